"""Two hosts on one machine: jobs across them go as on one host, what crosses the link is counted, and nothing is left of them."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import psutil
import pytest
from launch_support import folders_of, running, wait_until

from helpers import RankDied, RankFailed, RanksHung, launch
from helpers.two_nodes import available, two_nodes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as with the functions of a cell
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[1]
possible, why_not = available()
on_two_hosts = pytest.mark.skipif(not possible, reason=f"this machine cannot be two hosts: {why_not}")


@pytest.fixture(scope="module")
def nodes():
    with two_nodes(rate="1gbit") as opened:
        yield opened


@pytest.fixture
def _the_next_launch_works(nodes):
    yield
    assert launch(add_up, ranks=4, nodes=nodes).results == [10.0] * 4


def add_up():
    import torch
    import torch.distributed as dist

    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total.item()


def inhabitants(namespaces):
    """Processes in any of these namespaces, given by their links' texts ("net:[4026532]")."""
    found = []
    for process in psutil.process_iter():
        for kind in ("user", "net"):
            try:
                if os.readlink(f"/proc/{process.pid}/ns/{kind}") in namespaces and running(process):
                    found.append(process.pid)
            except OSError:
                continue
    return found


def namespaces_of(nodes):
    """What the namespaces of both hosts are called; none of them is this process's own."""
    names = {os.readlink(path) for host in nodes.hosts for path in host.namespaces}
    assert not names & {os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "net")}
    assert len(names) == 3
    return names


# -------------------------------------------------------------------------------------------------------------- jobs that end


@on_two_hosts
def test_a_job_goes_as_on_one_host_with_half_of_the_ranks_on_each(nodes):
    def job(word):
        import os
        import socket

        import torch
        import torch.distributed as dist

        print(word, "from", dist.get_rank())
        x = torch.randn(1000)
        dist.all_reduce(x)
        interfaces = sorted(name for _, name in socket.if_nameindex())
        places = {
            name: os.environ[name] for name in ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR")
        }
        return x, interfaces, places

    run = launch(job, "hello", ranks=4, nodes=nodes)
    alone = launch(job, "hello", ranks=4)
    for number, (x, interfaces, places) in enumerate(run.results):
        assert interfaces == ["link0" if number < 2 else "link1", "lo"]
        assert places == {
            "LOCAL_RANK": str(number % 2),
            "GROUP_RANK": str(number // 2),
            "LOCAL_WORLD_SIZE": "2",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": nodes.hosts[0].address,
        }
        assert (x == alone.results[number][0]).all()
        assert run.output(number) == f"hello from {number}\n"
    assert [(c.rank, c.op, c.group, c.bytes) for c in run.collectives] == [
        (c.rank, c.op, c.group, c.bytes) for c in alone.collectives
    ]
    assert (run.device, run.backend, len(run.seconds)) == ("cpu", "gloo", 4)
    assert max(start for start, _ in run.spans) < min(end for _, end in run.spans)  # one clock for both hosts
    assert run.machine == f"{alone.machine}, as 2 hosts"


@on_two_hosts
def test_only_what_goes_from_host_to_host_crosses_the_link(nodes):
    def job(size, pairs):
        import torch
        import torch.distributed as dist

        groups = [dist.new_group(pair) for pair in pairs]
        mine = next(group for group, pair in zip(groups, pairs, strict=True) if dist.get_rank() in pair)
        dist.all_reduce(torch.ones(size // 4), group=mine)

    def carried(pairs, size=16 * MIB):
        before = nodes.bytes_between()
        launch(job, size, pairs, ranks=4, nodes=nodes)
        return [after - earlier for after, earlier in zip(nodes.bytes_between(), before, strict=True)]

    for each_way in carried([[0, 1], [2, 3]]):
        assert 0 < each_way < MIB  # the hosts' agents and ranks met
    for each_way in carried([[0, 2], [1, 3]]):  # an all-reduce of two sends its payload once each way
        assert each_way == pytest.approx(2 * 16 * MIB, rel=0.08)


@on_two_hosts
def test_what_one_host_sends_is_what_the_other_receives_and_counts_only_grow(nodes):
    def received(host):
        listed = nodes.run(host, ["cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
        return next(int(line.split(":")[1].split()[0]) for line in listed.splitlines() if "link" in line)

    seen = [nodes.bytes_between()]
    for _ in range(3):
        launch(add_up, ranks=2, nodes=nodes)
        seen.append(nodes.bytes_between())
    assert seen == sorted(seen)
    assert len(set(seen)) == len(seen)
    wait_until(lambda: (received(1), received(0)) == nodes.bytes_between(), "both ends of the link agree")


@on_two_hosts
def test_the_rate_can_be_changed(nodes):
    def told(host):
        return nodes.run(host, ["tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout

    nodes.set_rate("200mbit")
    assert (nodes.rate, nodes.bytes_per_second) == ("200mbit", 25e6)
    assert all("tbf" in told(host) and "rate 200Mbit" in told(host) for host in (0, 1))
    assert launch(add_up, ranks=2, nodes=nodes).results == [3.0, 3.0]
    with pytest.raises(ValueError, match="fast"):
        nodes.set_rate("fast")
    assert "rate 200Mbit" in told(0)
    assert nodes.rate == "200mbit"
    nodes.set_rate("1gbit")
    assert "rate 1Gbit" in told(1)


@on_two_hosts
def test_both_hosts_describe_themselves(nodes):
    assert [(host.number, host.address, host.interface) for host in nodes.hosts] == [
        (0, "10.77.0.1", "link0"),
        (1, "10.77.0.2", "link1"),
    ]
    assert "10.77.0.1 (link0) and 10.77.0.2 (link1), joined at 1gbit (125 MB/s each way)" in repr(nodes)


# ---------------------------------------------------------------------------------------------------- jobs that fail


@on_two_hosts
@pytest.mark.usefixtures("_the_next_launch_works")
@pytest.mark.parametrize("number", [0, 3])
def test_the_rank_that_raises_is_named_with_its_host_and_its_own_lines(nodes, number):
    def job(at_fault):
        import torch
        import torch.distributed as dist

        if dist.get_rank() == at_fault:
            raise KeyError("no such expert")
        dist.all_reduce(torch.ones(4))

    with pytest.raises(RankFailed, match=f"rank {number} of 4 on host {number // 2} raised KeyError") as info:
        launch(job, number, ranks=4, nodes=nodes)
    assert info.value.rank == number
    assert 'raise KeyError("no such expert")' in info.value.traceback
    assert [result for result in info.value.run.results if result is not None] == []


@on_two_hosts
@pytest.mark.usefixtures("_the_next_launch_works")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, 7])
def test_the_rank_that_dies_is_named_with_its_signal_or_code(nodes, how):
    def job(how):
        import os
        import signal

        import torch
        import torch.distributed as dist

        if dist.get_rank() == 2:
            print("last words", flush=True)
            os.kill(os.getpid(), how) if isinstance(how, signal.Signals) else os._exit(how)
        dist.all_reduce(torch.ones(4))

    with pytest.raises(RankDied, match="rank 2 of 4 on host 1") as info:
        launch(job, how, ranks=4, nodes=nodes)
    assert info.value.rank == 2
    assert info.value.run.output(2).startswith("last words\n")
    assert (info.value.signal, info.value.code) == ((None, 7) if how == 7 else (how.name, None))


@on_two_hosts
@pytest.mark.usefixtures("_the_next_launch_works")
def test_a_job_that_hangs_says_who_waits_for_whom_where(nodes):
    def job():
        import time

        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(4))

    with pytest.raises(RanksHung, match="ranks 0, 2, 3 wait for rank 1") as info:
        launch(job, ranks=4, nodes=nodes, timeout=2)
    assert info.value.rank == 1
    assert "time.sleep(1000)" in "".join(info.value.stacks[1])
    assert info.value.waiting.keys() == {0, 2, 3}


@on_two_hosts
@pytest.mark.usefixtures("_the_next_launch_works")
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_fails_in_the_middle_of_a_job_is_named_and_starts_anew(nodes, host, tmp_path):
    def job(folder):
        import torch
        import torch.distributed as dist

        while True:
            dist.all_reduce(torch.ones(4))
            (folder / f"began{dist.get_rank()}").touch()

    def fail_once_it_runs():
        wait_until(lambda: len(os.listdir(tmp_path)) == 4, "every rank has begun")
        nodes.fail(host)

    failing = threading.Thread(target=fail_once_it_runs)
    failing.start()
    ranks = (0, 1) if host == 0 else (2, 3)
    with pytest.raises(RankDied, match=f"on host {host}, where ranks {ranks[0]}, {ranks[1]} ended at once") as info:
        launch(job, tmp_path, ranks=4, nodes=nodes)
    failing.join()
    assert info.value.rank in ranks
    assert info.value.signal == "SIGKILL"


@on_two_hosts
@pytest.mark.usefixtures("_the_next_launch_works")
def test_what_keeps_the_agents_from_meeting_is_said(nodes):
    from helpers.launching import hosts
    from helpers.launching.engine import workplace

    port = hosts.port(workplace().jobs + 1)
    listener = f"import socket, time; s = socket.create_server(('', {port})); print(1, flush=True); time.sleep(1000)"
    occupant = nodes.popen(0, [sys.executable, "-c", listener], stdout=subprocess.PIPE)
    occupant.stdout.readline()
    try:
        with pytest.raises(RankFailed, match=f"port: {port}.*(?i:address already in use)") as info:
            launch(add_up, ranks=4, nodes=nodes)
        assert info.value.rank == 0
    finally:
        occupant.kill()
        occupant.communicate()


@pytest.mark.parametrize(
    ("keywords", "error", "says"),
    [
        ({"ranks": 3}, ValueError, "multiple of 2"),
        ({"ranks": 2, "backend": "nccl"}, ValueError, "nccl"),
        ({"ranks": 2, "nodes": two_nodes}, TypeError, "must be what `with two_nodes"),
    ],
)
@on_two_hosts
def test_a_call_that_cannot_work_is_refused(nodes, keywords, error, says):
    with pytest.raises(error, match=says):
        launch(add_up, **{"nodes": nodes, **keywords})


# ------------------------------------------------------------------------------------------------------------- plain commands


TRAINER = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", int(total), "on host", os.environ["GROUP_RANK"], "through", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
dist.destroy_process_group()
"""


@on_two_hosts
def test_torchrun_runs_a_script_across_both_hosts(nodes, tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", nodes.hosts[0].address, "--master-port", "29500"]
    agents = [
        nodes.popen(
            host,
            [*command, "--node-rank", str(host), "--local-addr", nodes.hosts[host].address, str(tmp_path / "trainer.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for host in (0, 1)
    ]
    told = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told
    for host, text in enumerate(told):
        assert f"sum 3 on host {host} through link{host}" in text


@on_two_hosts
def test_a_command_has_the_environment_that_it_is_given(nodes):
    def told(**keywords):
        shown = ["sh", "-c", "echo $PATH, $GLOO_SOCKET_IFNAME, $ASKED; command -v tc > /dev/null && echo tc is found"]
        return nodes.run(1, shown, capture_output=True, text=True, **keywords).stdout.splitlines()

    path, found = told(env={"PATH": "/mine:/usr/bin:/bin", "ASKED": "yes"})
    assert path == "/mine:/usr/bin:/bin:/usr/sbin:/sbin, link1, yes"
    assert found == "tc is found"
    assert told(env={"PATH": "/bin:/usr/bin", "GLOO_SOCKET_IFNAME": "lo"})[0].endswith(", lo,")
    assert told()[0].startswith(os.environ["PATH"])


@on_two_hosts
def test_a_host_fails_with_every_process_and_only_its_own(nodes):
    leaves_home = "setsid sleep 1000 & wait"
    commands = [nodes.popen(host, ["sh", "-c", leaves_home]) for host in (0, 1, 1)]
    names = [os.readlink(host.namespaces[1]) for host in nodes.hosts]
    wait_until(lambda: [len(inhabitants({name})) for name in names] == [3, 5], "all run, beside who holds the host")
    nodes.fail(1)
    assert [command.wait(60) for command in commands[1:]] == [-signal.SIGKILL] * 2
    assert len(inhabitants({names[1]})) == 1
    assert commands[0].poll() is None
    nodes.fail(0)
    assert commands[0].wait(60) == -signal.SIGKILL
    with pytest.raises(ValueError, match="host is 2"):
        nodes.fail(2)


# ------------------------------------------------------------------------------------------------------------ nothing is left


OWNER = """
import os, sys
from helpers import launch
from helpers.two_nodes import two_nodes

def job(folder):
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(4))
    open(f"{folder}/began{dist.get_rank()}", "w").close()
    while True:
        dist.all_reduce(torch.ones(4))

how, folder = sys.argv[1:]
with two_nodes() as nodes:
    print(*{os.readlink(path) for host in nodes.hosts for path in host.namespaces}, flush=True)
    quiet = {"stdout": -3, "stderr": -3}
    nodes.popen(0, ["sleep", "1000"], **quiet)
    nodes.popen(1, ["sh", "-c", "setsid sleep 1000 & wait"], **quiet)
    if how == "error":
        1 / 0
    if how == "guardian killed":
        os.kill(nodes.hosts[0].pid, 9)
    elif how != "end":
        launch(job, folder, ranks=4, nodes=nodes, timeout=None)
"""


@on_two_hosts
@pytest.mark.parametrize("how", ["end", "error", "interrupt", "kill", "guardian killed", "terminate"])
def test_nothing_is_left(how, tmp_path):
    temporary, folder = tmp_path / "temporary", tmp_path / "job"
    temporary.mkdir()
    folder.mkdir()
    before = set(os.listdir("/sys/class/net")), Path("/proc/self/mountinfo").read_text()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "owner.py", "w") as file:
        file.write(OWNER)
    owner = subprocess.Popen(
        [sys.executable, file.name, how, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        namespaces = set(owner.stdout.readline().split())
        assert len(namespaces) == 3, owner.communicate()[1]
        signals = {"interrupt": signal.SIGINT, "kill": signal.SIGKILL, "terminate": signal.SIGTERM}
        if how in signals:
            wait_until(lambda: len(os.listdir(folder)) == 4, "every rank has begun")
            assert len(inhabitants(namespaces)) > 10
            owner.send_signal(signals[how])
        _, said = owner.communicate(timeout=120)
    finally:
        owner.kill()
    codes = {"end": 0, "error": 1, "guardian killed": 0, "interrupt": -signal.SIGINT, "kill": -9, "terminate": -15}
    assert owner.returncode == codes[how], said
    wait_until(lambda: inhabitants(namespaces) == [], "no process is left on either host")
    wait_until(lambda: os.listdir(temporary) + folders_of(owner.pid) == [], "no temporary file is left")
    assert (set(os.listdir("/sys/class/net")), Path("/proc/self/mountinfo").read_text()) == before


ORDINARY = """
import json, os
from helpers import launch
from helpers.two_nodes import two_nodes

def job():
    import torch, torch.distributed as dist
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total.item()

with two_nodes() as nodes:
    namespaces = [os.readlink(path) for host in nodes.hosts for path in host.namespaces]
    results = launch(job, ranks=2, nodes=nodes).results
    user, carried = os.stat(f"/proc/{nodes.hosts[1].pid}").st_uid, nodes.bytes_between()
print(json.dumps([os.getresuid(), user, results, min(carried), namespaces]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become an ordinary user")
def test_an_ordinary_user_has_two_hosts_too_and_nothing_is_left(tmp_path):
    nobody = 65534
    for parent in (tmp_path, *tmp_path.parents):  # pytest's own folders are closed to others
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    temporary, script = tmp_path / "temporary", tmp_path / "owner.py"
    temporary.mkdir()
    os.chown(temporary, nobody, nobody)
    script.write_text(ORDINARY)
    environment = {**os.environ, "TMPDIR": str(temporary), "HOME": str(temporary), "PYTHONPATH": str(ROOT)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    as_nobody = {"user": nobody, "group": nobody, "extra_groups": [], "cwd": tmp_path, "env": environment, "text": True}
    as_nobody |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        tried = subprocess.run([sys.executable, "-c", "from helpers.two_nodes import available as a; print(*a())"], **as_nobody)
    except PermissionError:
        pytest.skip("an ordinary user may not run this Python")
    if not tried.stdout.startswith("True"):
        pytest.skip(f"an ordinary user cannot have two hosts here: {tried.stdout}{tried.stderr}")

    before = set(os.listdir("/sys/class/net")), Path("/proc/self/mountinfo").read_text()
    owner = subprocess.Popen([sys.executable, script], **as_nobody)
    try:
        told, said = owner.communicate(timeout=120)
    finally:
        owner.kill()
    assert owner.returncode == 0, said
    users, user_inside, results, carried, namespaces = json.loads(told)
    assert (set(users), user_inside, results) == ({nobody}, nobody, [3.0, 3.0])
    assert carried > 0
    wait_until(lambda: inhabitants(set(namespaces)) == [], "no process is left on either host")
    wait_until(lambda: os.listdir(temporary) + folders_of(owner.pid) == [], "no temporary file is left")
    assert (set(os.listdir("/sys/class/net")), Path("/proc/self/mountinfo").read_text()) == before


@on_two_hosts
def test_hosts_can_be_opened_again_but_not_used_while_closed(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a path that is no text, which Python ignores
    nodes = two_nodes(rate="1.5gbit")
    assert "closed" in repr(nodes)
    for use in (nodes.bytes_between, lambda: nodes.run(0, ["true"]), lambda: launch(add_up, ranks=2, nodes=nodes)):
        with pytest.raises(RuntimeError, match="the two hosts are closed"):
            use()
    for _ in range(2):
        with nodes:
            assert nodes.bytes_between() == (0, 0)
            assert nodes.run(1, ["true"]).returncode == 0
            with pytest.raises(RuntimeError, match="open already"):
                nodes.open()
    nodes.close()
    nodes.open()
    for number in (0, 1):
        os.kill(nodes.hosts[number].pid, signal.SIGKILL)
        wait_until(lambda: "was killed" in str(_error(lambda: nodes.hosts)), "the end of what holds the hosts is seen")
        nodes.close()
        nodes.open()
    nodes.close()


def _error(use):
    try:
        use()
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "rate", ["fast", "200", "0mbit", "-1gbit", "1 gbit", "1gbit; true", "0.001kbit", "9999gbit", "٣mbit", 1e9, None]
)
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="it must be a number of kbit, mbit or gbit"):
        two_nodes(rate=rate)


# --------------------------------------------------------------------------------------------- machines that cannot


def test_where_namespaces_are_refused_it_is_said_why_and_what_would_help():
    code = (
        "from helpers.two_nodes import two_nodes\nprint(two_nodes.available()[0], two_nodes.available()[1])\n"
        "try:\n    two_nodes().open()\nexcept RuntimeError as error:\n    print(error)"
    )
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces || exit 77; exec "$@"'  # counts in the namespace that it is said in
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode:
        assert done.returncode in (1, 77), done.stderr
        pytest.skip(f"namespaces cannot be forbidden for a test here: {done.stderr}")
    possible, raised = done.stdout.splitlines()
    assert possible.startswith("False user namespaces are not allowed (unshare: unshare failed: No space left on device)")
    assert "; mend: where there is no space left: sysctl user.max_user_namespaces=" in possible  # the switch that is off here
    assert raised == f"this machine cannot be two hosts: {possible.removeprefix('False ')}"
