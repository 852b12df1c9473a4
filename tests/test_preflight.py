"""Each state that spoils workshops is recognised, and only what prevents the course makes the command fail."""

import http.server
import importlib.metadata
import os
import socket
import subprocess
import sys
import threading

import pytest

from helpers import machine, preflight
from helpers.preflight import Check

MIB, GIB = 2**20, 2**30
H200 = machine.Gpu(0, "NVIDIA H200", "GPU-1", 139 * GIB, (9, 0))


def state_and_meaning(check: Check) -> tuple[str, str]:
    assert check.state == "ok" or check.mend, "what is wrong has a mend"
    return check.state, check.meaning


@pytest.mark.parametrize(
    ("version", "system", "state", "said"),
    [
        ((3, 10), "Linux", "fail", "3.10 on Linux; the course needs 3.11"),
        ((3, 11), "Linux", "ok", "3.11 on Linux"),
        ((3, 14), "Darwin", "warn", "spawn"),
        ((3, 12), "Windows", "fail", "Windows"),
    ],
)
def test_python_and_system(version, system, state, said):
    found, meaning = state_and_meaning(preflight.python(version, system))
    assert found == state
    assert said in meaning


def test_packages_missing_and_outside_their_ranges():
    def installed(name):
        versions = {"torch": "2.13.0+cpu", "transformers": "5.24.0"}
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    torch, transformers, missing = "torch==2.13.*", "transformers>=5.16.1,<5.20", "not-here>=1"
    assert preflight.packages([torch], installed).state == "ok"
    state, meaning = state_and_meaning(preflight.packages([torch, transformers], installed))
    assert (state, meaning) == ("warn", "outside the tested ranges: transformers 5.24.0 (wanted: <5.20,>=5.16.1)")
    assert state_and_meaning(preflight.packages([missing, transformers], installed)) == ("fail", "missing: not-here>=1")


def test_the_installed_packages_are_read_from_pyproject():
    assert preflight.packages().state == "ok"


def test_a_torch_that_cannot_be_imported_fails():
    state, meaning = state_and_meaning(preflight.torch("ImportError: undefined symbol: ncclCommSplit"))
    assert (state, meaning) == ("fail", "cannot be used: ImportError: undefined symbol: ncclCommSplit")
    assert preflight.torch("no answer within 14 s").state == "warn"
    assert importlib.metadata.version("torch") in preflight.torch("").meaning


def test_trying_code_tells_error_death_and_silence():
    assert preflight._try("print('fine')") == ""
    assert preflight._try("import not_a_module") == "ModuleNotFoundError: No module named 'not_a_module'"
    assert preflight._try("import os; os.kill(os.getpid(), 9)") == "ended with exit code -9"
    assert preflight._try("import threading; threading.Event().wait()", seconds=0.5) == "no answer within 0.5 s"
    assert preflight._try(preflight._TRY_TORCH, seconds=250) == ""


def test_gpus_are_really_tried():
    error = preflight._try(preflight._TRY_GPUS.format(count=1000), seconds=250)
    assert error  # no machine has a thousand; a CPU build, a missing driver and a wrong ordinal all end here
    assert not error.startswith(("SyntaxError", "NameError", "no answer"))


@pytest.mark.parametrize(
    ("build", "driver", "error", "state", "said"),
    [
        (None, None, "", "warn", "CPU build"),
        ("13.0", "12.4", "", "fail", "driver is made for CUDA 12.4, torch for CUDA 13.0"),
        ("13.0", "13.1", "RuntimeError: CUDA error: out of memory", "fail", "seen but unusable: RuntimeError: CUDA error"),
        ("13.0", "13.0", "no answer within 14 s", "warn", "no answer"),
        ("12.8", "13.0", "", "ok", "NVIDIA H200 computes"),
        ("13.2", "13.0", "", "ok", "computes"),  # minor versions are compatible
    ],
)
def test_gpu_states(build, driver, error, state, said):
    found, meaning = state_and_meaning(preflight.gpu([H200], build, driver, error))
    assert found == state
    assert said in meaning


def test_no_gpu_is_fine_whatever_torch_was_built_for(monkeypatch):
    monkeypatch.delenv("WORKSHOP_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert preflight.gpu([], "13.0", None) == Check("GPU", "ok", "none; ranks run on the CPU")
    monkeypatch.setenv("WORKSHOP_DEVICE", "cpu")
    assert "hidden by a variable" in preflight.gpu(build="13.0", driver=None).meaning


@pytest.mark.parametrize(("available", "state"), [(GIB // 2, "fail"), (2 * GIB, "warn"), (4 * GIB, "ok")])
def test_memory(available, state):
    assert state_and_meaning(preflight.memory(available))[0] == state


def test_the_fullest_disk_decides():
    assert preflight.disk({"/home": 50 * GIB, "/tmp": 10 * GIB}).state == "ok"
    assert state_and_meaning(preflight.disk({"/home": 50 * GIB, "/tmp": GIB})) == ("warn", "1.0 GiB free in /tmp")
    assert state_and_meaning(preflight.disk({"/home": 20 * MIB, "/tmp": GIB})) == ("fail", "20 MiB free in /home")


def test_small_or_missing_shared_memory(tmp_path):
    state, meaning = state_and_meaning(preflight.shared_memory(64 * MIB))
    assert state == "warn"
    assert meaning.startswith("64 MiB free in /dev/shm")
    assert preflight.shared_memory(folder=str(tmp_path / "absent")).state == "warn"
    assert preflight.shared_memory(GIB).state == "ok"


def test_few_open_files():
    import resource

    assert state_and_meaning(preflight.open_files(256))[0] == "warn"
    assert preflight.open_files(1024).state == "ok"
    assert preflight.open_files(resource.RLIM_INFINITY).state == "ok"


def test_loopback_answers_or_fails():
    assert preflight.loopback().state == "ok"
    state, meaning = state_and_meaning(preflight.loopback("192.0.2.1"))  # an address for documentation: nobody's
    assert state == "fail"
    assert "192.0.2.1 does not answer" in meaning


def test_a_host_name_without_an_address():
    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    check = preflight.host_name("lonely", unknown)
    assert check.state == "warn"
    assert check.mend == "add the line '127.0.0.1 lonely' to /etc/hosts"
    assert preflight.host_name("known", lambda name: "127.0.0.1").state == "ok"


def test_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert state_and_meaning(preflight.compiler(lambda name: None))[0] == "warn"
    assert preflight.compiler({"clang++": "/bin/clang++"}.get).meaning.startswith("clang++")
    monkeypatch.setenv("CXX", "my-compiler")
    assert preflight.compiler({"my-compiler": "/opt/my-compiler", "g++": "/bin/g++"}.get).meaning.startswith("my-compiler")


def test_two_hosts_need_linux_commands_and_namespaces():
    def everything(name, path):
        return f"/sbin/{name}"

    def no_tc(name, path):
        return None if name == "tc" else f"/sbin/{name}"

    refused = [sys.executable, "-c", "import sys; sys.exit('unshare failed: Operation not permitted')"]
    granted = [sys.executable, "-c", ""]
    assert "Darwin has no network namespaces" in state_and_meaning(preflight.two_hosts("Darwin", everything))[1]
    assert state_and_meaning(preflight.two_hosts("Linux", no_tc))[1].startswith("no tc: ")
    state, meaning = state_and_meaning(preflight.two_hosts("Linux", everything, refused))
    assert state == "warn"
    assert "Operation not permitted" in meaning
    state, meaning = state_and_meaning(preflight.two_hosts("Linux", everything, granted, refused))
    assert state == "warn"
    assert meaning.startswith("this kernel gives no link with a limited rate (unshare failed")
    assert preflight.two_hosts("Linux", everything, granted, granted).state == "ok"


@pytest.fixture
def hub():
    """Start a local stand-in for the model hub; gives a function from the status it shall answer to its address."""
    servers = []

    def start(status):
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args):
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_model_hub_answers_refuses_or_is_silent(hub, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert preflight.model_hub(hub(200)).state == "ok"
    assert "403" in state_and_meaning(preflight.model_hub(hub(403)))[1]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, never answers
        check = preflight.model_hub(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.5)
    assert check.state == "warn"
    assert "timed out" in check.meaning
    assert preflight.model_hub("").meaning.startswith("not asked")


def test_vllm_absent_broken_and_working():
    state, meaning = state_and_meaning(preflight.vllm({}.get, left_out=""))
    assert (state, meaning[:14]) == ("warn", "not installed:")
    assert (
        "not installed, it has no packages for Darwin:"
        in preflight.vllm({}.get, left_out="it has no packages for Darwin").meaning
    )
    both = dict.fromkeys(["vllm", "torchvision"], "found")
    check = preflight.vllm(both.get, "RuntimeError: operator torchvision::nms does not exist", cpu_build=True)
    assert check.state == "warn"
    assert "operator torchvision::nms does not exist" in check.meaning
    assert "uninstall -y torchvision" in check.mend
    alone = {"vllm": "found"}.get
    assert "needs a GPU" in state_and_meaning(preflight.vllm(alone, cpu_build=False, gpus=0))[1]
    assert preflight.vllm(alone, cpu_build=True, gpus=0) == Check("vLLM", "ok", "installed, its build for the CPU")
    assert preflight.vllm(alone, cpu_build=False, gpus=1) == Check("vLLM", "ok", "installed, its build for GPUs")


def test_why_the_set_up_left_vllm_out_is_read_from_its_stamp(tmp_path):
    assert preflight._left_out(str(tmp_path)) == ""
    (tmp_path / "set-up.json").write_text('{"extras": ["dev"], "without_vllm": "the disk has 1.0 GiB free"}')
    assert preflight._left_out(str(tmp_path)) == "the disk has 1.0 GiB free"
    (tmp_path / "set-up.json").write_text('{"extras": ')
    assert preflight._left_out(str(tmp_path)) == ""


def test_checks_run_at_the_same_time_in_order_and_survive_silence_and_errors():
    meeting = threading.Barrier(2, timeout=30)
    never = threading.Event()

    def first():
        meeting.wait()
        return Check("first", "ok", "met")

    def second():
        meeting.wait()
        return Check("second", "ok", "met")

    def broken():
        raise KeyError("no such file")

    def silent():
        never.wait()
        return Check("silent", "ok", "")

    assert [check.meaning for check in preflight.checks([silent], seconds=0.2)] == ["no answer within 0.2 s"]
    never.set()
    found = preflight.checks([first, second, broken], seconds=60)
    assert [check.name for check in found] == ["first", "second", "broken"]
    assert [check.state for check in found] == ["ok", "ok", "warn"]
    assert "KeyError" in found[2].meaning


@pytest.mark.parametrize(("states", "code"), [(["ok", "warn"], 0), (["ok", "fail"], 1)])
def test_only_what_prevents_the_course_makes_the_command_fail(monkeypatch, capsys, states, code):
    monkeypatch.setattr(preflight, "checks", lambda: [Check(state, state, "as it is", "so") for state in states])
    assert preflight.main() == code
    printed = capsys.readouterr().out
    assert f"{states[1]:<5} {states[1]}: as it is\n      mend: so" in printed
    assert "1 ok" in printed


def test_the_command_on_this_machine():
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WORKSHOP_DEVICE": "cpu"}
    command = [sys.executable, "-m", "helpers.preflight"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("Python", "packages", "torch", "GPU", "memory", "disk", "shared memory", "two hosts", "model hub", "vLLM"):
        assert f" {name}: " in done.stdout
