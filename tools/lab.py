"""Open the workshop: copy new notebooks to my_notebooks/ and start JupyterLab there, on 127.0.0.1 and behind a token.

python tools/lab.py               # `make lab`; opens a browser where there is a screen, prints the address everywhere
python tools/lab.py --port 9000   # `make lab PORT=9000`; a port in use makes the server take another
"""

import argparse
import json
import os
import secrets
import sys
from pathlib import Path

import learner_notebooks
from jupyter_server.serverapp import ServerApp
from jupyterlab.labapp import LabApp

ROOT = Path(__file__).parents[1]
FIRST = "00_start_here.ipynb"


def has_screen(environment: dict[str, str], system: str = sys.platform) -> bool:
    """Whether a browser can open where this runs: not in CI, and not on a Linux without a display."""
    if environment.get("CI") or environment.get("SSH_CONNECTION"):
        return False
    return system != "linux" or any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"))


def settings(folder: Path, port: int, token: str, browser: bool) -> list[str]:
    """Command-line settings of JupyterLab: they rule over the person's own configuration files."""
    page = f"/lab/tree/{FIRST}" if (folder / FIRST).exists() else "/lab"
    return [
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        f"--ServerApp.open_browser={browser}",
        f"--ServerApp.root_dir={folder}",
        f"--ServerApp.allow_root={hasattr(os, 'geteuid') and os.geteuid() == 0}",  # containers; Jupyter refuses otherwise
        "--ServerApp.log_level=WARN",
        f"--IdentityProvider.token={token}",
        "--KernelManager.transport_encryption=auto",  # outputs of a kernel are not for the other users of a shared machine
        f"--LabApp.default_url={page}",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]


DEFAULTS = {  # what JupyterLab does unless a person sets it otherwise
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false"
    },  # asked once by everybody: thirty need not click it away
    "@jupyterlab/notebook-extension:tracker": {"codeCellConfig": {"lineNumbers": False, "lineWrap": True}},  # no line is cut off
}


def set_defaults(prefix: Path) -> None:
    """Write `DEFAULTS` of JupyterLab, into the project's own environment only."""
    if ROOT in prefix.parents:
        path = prefix / "share" / "jupyter" / "lab" / "settings" / "overrides.d" / "parallelism_measured.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(DEFAULTS), encoding="utf-8")


def announce(server: ServerApp, browser: bool) -> None:
    """Print where the workshop is."""
    print(
        f"\nThe workshop is open at\n\n    http://127.0.0.1:{server.port}{server.default_url}?token={server.identity_provider.token}\n"
    )
    if not browser:
        print(f"From another computer: ssh -L {server.port}:127.0.0.1:{server.port} <this one>, then the same address there.")
    print("Ctrl-C, twice, closes it.", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8888, help="port on 127.0.0.1 (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=learner_notebooks.MINE, help="where the copies live (default: my_notebooks)"
    )
    options = parser.parse_args()
    folder = options.folder.absolute()
    for line in learner_notebooks.copy_new(mine=folder):
        print(line)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    set_defaults(Path(sys.prefix))
    browser = has_screen(dict(os.environ))
    # The token is given inside this process: on a command line every user of the machine could read it.
    server = LabApp.initialize_server(argv=settings(folder, options.port, secrets.token_hex(24), browser))
    server.io_loop.add_callback(announce, server, browser)  # runs after the socket is bound
    server.start()
    return 0


if __name__ == "__main__":
    sys.exit(main())
