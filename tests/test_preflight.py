"""Each state that spoils workshops is recognised, and only what prevents the course makes the command fail."""

import http.server
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import types

import psutil
import pytest

from helpers import machine, preflight
from helpers.preflight import Check

MIB, GIB = 2**20, 2**30
H200 = machine.Gpu(0, "NVIDIA H200", "GPU-1", 139 * GIB)


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


def test_packages_missing_and_outside_their_ranges(tmp_path, monkeypatch):
    def installed(name):
        versions = {"torch": "2.13.0+cpu", "transformers": "5.24.0"}
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def ask(*wanted):
        (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = {list(wanted)}\n")
        return preflight.packages()

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(preflight, "PROJECT", tmp_path)
    torch, transformers, missing = "torch==2.13.*", "transformers>=5.16.1,<5.20", "not-here>=1"
    assert ask(torch).state == "ok"
    state, meaning = state_and_meaning(ask(torch, transformers))
    assert (state, meaning) == ("warn", "outside the tested ranges: transformers 5.24.0 (wanted: <5.20,>=5.16.1)")
    assert state_and_meaning(ask(missing, transformers)) == ("fail", "missing: not-here>=1")


def test_the_installed_packages_are_read_from_pyproject():
    assert preflight.packages().state == "ok"


def test_a_torch_that_cannot_be_imported_fails(monkeypatch):
    monkeypatch.setattr(preflight, "_try", lambda *command: ("broken", "ImportError: undefined symbol: ncclCommSplit"))
    state, meaning = state_and_meaning(preflight.torch())
    assert (state, meaning) == ("fail", "cannot be used: ImportError: undefined symbol: ncclCommSplit")
    monkeypatch.setattr(preflight, "_try", lambda *command: ("silent", "no answer within 14 s"))
    assert state_and_meaning(preflight.torch()) == ("warn", "cannot be used: no answer within 14 s")


def test_trying_code_tells_error_death_and_silence():
    def run(code, **keywords):
        return preflight._try(sys.executable, "-c", code, **keywords)

    assert run("print('fine')") == ("ok", "fine")
    assert run("import not_a_module") == ("broken", "ModuleNotFoundError: No module named 'not_a_module'")
    assert run("import os; os.kill(os.getpid(), 9)") == ("broken", "ended with exit code -9")
    assert run("import threading; threading.Event().wait()", seconds=0.5) == ("silent", "no answer within 0.5 s")
    assert run(preflight._TRY_TORCH, seconds=250) == ("ok", importlib.metadata.version("torch"))


def test_gpus_are_really_tried():
    found, error = preflight._try(sys.executable, "-c", preflight._TRY_GPUS.format(count=1000), seconds=250)
    assert found == "broken"  # no machine has a thousand; a CPU build, a missing driver and a wrong ordinal all end here
    assert not error.startswith(("SyntaxError", "NameError"))


@pytest.mark.parametrize(
    ("build", "tried", "state", "said"),
    [
        (None, None, "warn", "stays idle: the installed torch is a CPU build"),
        (
            "13.0",
            ("broken", "RuntimeError: The NVIDIA driver on your system is too old"),
            "fail",
            "driver on your system is too old",
        ),
        ("13.0", ("broken", "RuntimeError: CUDA error: out of memory"), "fail", "seen but unusable: RuntimeError: CUDA error"),
        ("13.0", ("silent", "no answer within 14 s"), "warn", "no answer"),
        ("12.8", ("ok", ""), "ok", "NVIDIA H200 computes (torch for CUDA 12.8)"),
    ],
)
def test_gpu_states(monkeypatch, build, tried, state, said):
    monkeypatch.setattr(machine, "gpus", lambda: (H200,))
    monkeypatch.setattr(machine, "torch_cuda", lambda: build)
    monkeypatch.setattr(preflight, "_try", lambda *command: tried)
    found, meaning = state_and_meaning(preflight.gpu())
    assert found == state
    assert said in meaning


def test_no_gpu_is_fine_whatever_torch_was_built_for(monkeypatch):
    monkeypatch.delenv("WORKSHOP_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "_ask_driver", lambda visible: ((), ()))
    assert preflight.gpu() == Check("GPU", "ok", "none; ranks run on the CPU")
    monkeypatch.setenv("WORKSHOP_DEVICE", "cpu")
    assert "hidden by a variable" in preflight.gpu().meaning


def test_a_wrong_device_is_told_with_all_else(monkeypatch, capsys):
    monkeypatch.setenv("WORKSHOP_DEVICE", "cuda")
    state, meaning = state_and_meaning(preflight.gpu())
    assert state == "fail"
    assert meaning.startswith("WORKSHOP_DEVICE is 'cuda'")
    monkeypatch.setattr(preflight, "checks", lambda: [preflight.gpu(), preflight.python()])
    assert preflight.main() == 1
    printed = capsys.readouterr().out
    assert printed.startswith("fail  GPU: WORKSHOP_DEVICE is 'cuda'")
    assert "ok    Python: " in printed


@pytest.mark.parametrize(("available", "state"), [(GIB // 2, "fail"), (2 * GIB, "warn"), (4 * GIB, "ok")])
def test_memory(monkeypatch, available, state):
    monkeypatch.setattr(machine, "memory", lambda: available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=5 * GIB))
    assert state_and_meaning(preflight.memory())[0] == state
    monkeypatch.setattr(machine, "memory", lambda: 5 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=available))
    assert state_and_meaning(preflight.memory())[0] == state


def test_the_fullest_disk_decides(tmp_path, monkeypatch):
    def judged(there, here):
        free = {str(tmp_path): here}
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free.get(folder, there)))
        return state_and_meaning(preflight.disk())

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert judged(50 * GIB, 10 * GIB)[0] == "ok"
    assert judged(50 * GIB, GIB) == ("warn", f"1.0 GiB free in {tmp_path}")
    assert judged(20 * GIB, 20 * MIB) == ("fail", f"20 MiB free in {tmp_path}")
    state, meaning = judged(GIB, 20 * GIB)
    assert state == "warn"
    assert str(tmp_path) not in meaning


def test_small_or_missing_shared_memory(tmp_path, monkeypatch):
    assert preflight.shared_memory(str(tmp_path / "absent")).state == "warn"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=64 * MIB))
    state, meaning = state_and_meaning(preflight.shared_memory(str(tmp_path)))
    assert state == "warn"
    assert meaning.startswith(f"64 MiB free in {tmp_path}")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=GIB))
    assert preflight.shared_memory(str(tmp_path)).state == "ok"


@pytest.mark.parametrize(("limit", "state"), [(256, "warn"), (1024, "ok"), ("infinite", "ok")])
def test_few_open_files(monkeypatch, limit, state):
    import resource

    limit = resource.RLIM_INFINITY if limit == "infinite" else limit
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert state_and_meaning(preflight.open_files())[0] == state


def test_loopback_answers_or_fails():
    assert preflight.loopback().state == "ok"
    state, meaning = state_and_meaning(preflight.loopback("192.0.2.1"))  # an address for documentation: nobody's
    assert state == "fail"
    assert "192.0.2.1 does not answer" in meaning


def test_a_host_name_without_an_address(monkeypatch):
    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "lonely")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    check = preflight.host_name()
    assert check.state == "warn"
    assert check.mend == "add the line '127.0.0.1 lonely' to /etc/hosts"
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    assert preflight.host_name() == Check("host name", "ok", "'lonely' has an address")


def test_compiler(monkeypatch):
    def judged(*installed):
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in installed else None)
        return state_and_meaning(preflight.compiler())

    monkeypatch.delenv("CXX", raising=False)
    assert judged()[0] == "warn"
    assert judged("clang++")[1].startswith("clang++")
    monkeypatch.setenv("CXX", "my-compiler")
    assert judged("my-compiler", "g++")[1].startswith("my-compiler")


def test_two_hosts_need_linux_commands_and_namespaces(monkeypatch):
    def judged(*missing, refused=None, system="Linux"):
        def run(*command):
            return ("broken", "unshare failed: Operation not permitted") if refused in command else ("ok", "")

        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(shutil, "which", lambda name, path: None if name in missing else f"/sbin/{name}")
        monkeypatch.setattr(preflight, "_try", run)
        return state_and_meaning(preflight.two_hosts())

    assert "Darwin has no network namespaces" in judged(system="Darwin")[1]
    assert judged("tc")[1].startswith("no tc: ")
    state, meaning = judged(refused="true")
    assert state == "warn"
    assert "not allowed (unshare failed: Operation not permitted)" in meaning
    state, meaning = judged(refused="sh")
    assert state == "warn"
    assert meaning.startswith("this kernel gives no link with a limited rate (unshare failed")
    assert judged()[0] == "ok"


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
    def judged(address, offline=False):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        return state_and_meaning(preflight.model_hub(timeout=0.5 if "silent" in address else 30))

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert judged(hub(200))[0] == "ok"
    assert "403" in judged(hub(403))[1]
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, never answers
        state, meaning = judged(f"http://127.0.0.1:{server.getsockname()[1]}/silent")
    assert state == "warn"
    assert "timed out" in meaning
    assert judged("http://127.0.0.1:9", offline=True)[1].startswith("not asked")


def test_vllm_absent_broken_and_working(monkeypatch):
    def judged(*installed, left_out="", cpu_build=False, gpus=0, tried=("ok", "")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
        monkeypatch.setattr(preflight, "_left_out", lambda: left_out)
        monkeypatch.setattr(preflight, "is_installed", lambda name: cpu_build)
        monkeypatch.setattr(machine, "gpus", lambda: (H200,) * gpus)
        monkeypatch.setattr(preflight, "_try", lambda *command: tried)
        check = preflight.vllm()
        assert check.state == "ok" or check.mend
        return check

    check = judged()
    assert (check.state, check.meaning[:14]) == ("warn", "not installed:")
    assert "not installed, it has no packages for Darwin:" in judged(left_out="it has no packages for Darwin").meaning
    broken = ("broken", "RuntimeError: operator torchvision::nms does not exist")
    check = judged("vllm", "torchvision", tried=broken, cpu_build=True)
    assert check.state == "warn"
    assert "operator torchvision::nms does not exist" in check.meaning
    assert "uninstall -y torchvision" in check.mend
    assert judged("vllm", tried=broken, cpu_build=True).state == "ok"  # no torchvision, nothing to try
    assert "needs a GPU" in judged("vllm").meaning
    assert judged("vllm", cpu_build=True) == Check("vLLM", "ok", "installed, its build for the CPU")
    assert judged("vllm", gpus=1) == Check("vLLM", "ok", "installed, its build for GPUs")


def test_every_finding_can_be_told():
    words = dict.fromkeys(["shown", "names", "said", "build", "name", "why", "device", "size", "folder", "limit", "address"], "x")
    words |= dict.fromkeys(["error", "system", "missing", "told"], "x")
    for name in preflight.FINDINGS.keys() - {"words"}:
        for finding in preflight.FINDINGS[name]:
            check = preflight._found(name, finding, **words)
            assert (check.state == "ok") == (not check.mend)
            assert check.state in ("ok", "warn", "fail")


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
