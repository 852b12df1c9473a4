"""Find the files of a model in a folder, the local hub cache or the hub, and see that they are whole before they are loaded.

Weights are safetensors; nothing else is fetched or accepted.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

TINY, ERNIE = "tiny-ernie", "ernie-0.3b"
TINY_FOLDER = Path(__file__).resolve().parent.parent / "data" / "tiny_ernie"
HUB_IDS = {ERNIE: "baidu/ERNIE-4.5-0.3B-PT"}
HUB_TIMEOUT = 5.0  # seconds to wait for the hub's first answer
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")  # one is needed
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FETCHED = (".json", ".safetensors", ".model", ".txt")


def find(name: str, *, complete: bool) -> Path:
    """The checked folder of a model, fetched from the hub if need be; `complete=False` where its configuration is enough.

    Order: "tiny-ernie", a folder of that path, the folder in WORKSHOP_MODELS_FOLDER, the local hub cache, the hub.
    Raises what `check` raises; ValueError for a name that means nothing here or on the hub; ConnectionError if the hub is silent.
    """
    if name == TINY or Path(name).is_dir():
        return check(TINY_FOLDER if name == TINY else Path(name).resolve(), complete=complete)
    repository = HUB_IDS.get(name, name)
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", repository):
        raise ValueError(
            f'no model is called {name!r}: use "{TINY}", "{ERNIE}", the path of a folder that exists, or owner/name as on the hub'
        )
    place, problem = at_hand(repository), "it is not on this machine"
    if place:
        try:
            return check(place, complete=complete)
        except FileNotFoundError as error:
            if place.parent.name != "snapshots":  # not the hub cache: somebody meant this folder
                raise
            problem = f"its copy in the hub cache is incomplete ({error})"
    return _download(repository, problem, complete=complete)


def at_hand(repository: str) -> Path | None:
    """Where the models folder or the hub cache holds a repository, complete or not."""
    if shelf := os.environ.get("WORKSHOP_MODELS_FOLDER"):
        for inside in (repository, repository.split("/")[1]):
            place = Path(shelf).expanduser().resolve() / inside
            if place.is_dir():
                return place
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _download(repository: str, problem: str, *, complete: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    with _hub_errors(repository, problem):
        siblings = HfApi().model_info(repository, timeout=HUB_TIMEOUT).siblings or []
    names = [sibling.rfilename for sibling in siblings if "/" not in sibling.rfilename]
    _check_names(names, f"{repository} on the hub", complete=complete)
    fetched = [name for name in names if name.endswith(FETCHED)] if complete else ["config.json"]
    with _hub_errors(repository, problem):
        places = [Path(hf_hub_download(repository, name)).parent for name in fetched]
    return check(places[0], complete=complete)


@contextmanager
def _hub_errors(repository: str, problem: str) -> Iterator[None]:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        yield
    except RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no model {repository} that everyone may read; look for its exact owner/name") from error
    except Exception as error:  # those of the client's HTTP library pass through, and which library that is differs by version
        raise ConnectionError(
            f"{repository} is needed from the hub, because {problem}, but the hub does not answer "
            f"({type(error).__name__}: {error}). Right: connect this machine; or put the model's files into a folder called "
            f"{repository.split('/')[1]} and set WORKSHOP_MODELS_FOLDER to the folder around it; or use "
            f'models.load("{ERNIE}", weights="random") for the shape alone, or models.load("{TINY}").'
        ) from error


def check(place: Path, *, complete: bool = True) -> Path:
    """`place`, if all that a model needs lies there uncut.

    Raises FileNotFoundError naming what is missing; ValueError for weights that are no safetensors or are cut off.
    """
    from safetensors import SafetensorError, safe_open

    _check_names([file.name for file in place.iterdir() if file.exists()], str(place), complete=complete)
    for file in _weight_files(place) if complete else ():
        try:
            safe_open(file, "np")  # reads the header, and sees whether the file is as long as that says
        except SafetensorError as error:
            raise ValueError(
                f"{file} ({file.stat().st_size:,} bytes) is cut off or not a safetensors file, perhaps a pointer of Git LFS or a "
                f"broken download ({error}). Right: fetch the file itself (git lfs pull, or download it again)."
            ) from None
    return place


def _check_names(names: Iterable[str], where: str, *, complete: bool) -> None:
    names = set(names)
    missing = [] if "config.json" in names else ["config.json"]
    if complete and not names & {WEIGHTS, INDEX}:
        if pickles := sorted(name for name in names if name.endswith(PICKLES)):
            raise ValueError(
                f"the weights of {where} are not safetensors but {', '.join(pickles)}: pickle files, which can run code when "
                f"they are opened, so they are not loaded here. Right: a safetensors version of the model ({WEIGHTS})."
            )
        missing.append(f"{WEIGHTS} (or {INDEX} and the files it names)")
    if complete and not names.intersection(TOKENIZERS):
        missing.append(f"a tokenizer ({', '.join(TOKENIZERS)})")
    if missing:
        raise FileNotFoundError(
            f"{where} is incomplete: it lacks {'; '.join(missing)}; it has {', '.join(sorted(names)) or 'no file'}"
        )


def _weight_files(place: Path) -> list[Path]:
    """The safetensors files of a folder: one, or those that its index names. Raises FileNotFoundError if one is missing."""
    if (place / WEIGHTS).exists():
        return [place / WEIGHTS]
    files = sorted(set(json.loads((place / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    missing = [name for name in files if not (place / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{place} is incomplete: {INDEX} names {len(files)} files, of which it lacks {', '.join(missing)}"
        )
    return [place / name for name in files]
