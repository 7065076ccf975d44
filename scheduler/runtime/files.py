"""Safe reading of files from untrusted paths: opening never blocks (FIFOs, devices), only regular files are
read, and reads are bounded even if the file grows meanwhile.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from ...io_struct import CaesuraError, ErrorCode

PIPELINE_INDEX = "model_index.json"
MAX_REASON = 1000


def checkpoint_error(path: str | Path, reason: str) -> CaesuraError:
    if len(reason) > MAX_REASON:
        reason = reason[:MAX_REASON] + " …"
    return CaesuraError(ErrorCode.CHECKPOINT_ERROR, f"{path}: {reason}", path=str(path), reason=reason)


def require_folder(path: str | Path) -> None:
    """Raise ``checkpoint_error`` if a checkpoint is not a folder, and say what would be one."""
    given = str(path)
    if os.path.isdir(given):  # pathlib's raises on a path that is too long
        return
    if os.path.lexists(given):
        raise checkpoint_error(path, "is a file; a model is a folder with config.json and *.safetensors")
    name = _hub_id(given) or "ORG/NAME"
    raise checkpoint_error(
        path,
        "there is no such folder. Nothing is downloaded: `hf download "
        f"{name} --local-dir FOLDER` gets a model of the Hugging Face hub, and FOLDER is then its path",
    )


def _hub_id(path: str) -> str | None:
    organisation, name = os.path.split(os.path.normpath(path))
    place, organisation = os.path.split(organisation)
    is_behind_nothing = not os.path.lexists(os.path.join(place, organisation)) and os.path.isdir(place or ".")
    found = f"{organisation}/{name}"
    return found if is_behind_nothing and re.fullmatch(r"[\w.-]+/[\w.-]+", found) else None


def is_pipeline(folder: str | Path) -> bool:
    return os.path.lexists(os.path.join(folder, PIPELINE_INDEX))


def open_regular(path: str | Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise checkpoint_error(path, f"cannot be opened: {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise checkpoint_error(path, "is not a regular file")
    return descriptor


def read_small(path: str | Path, limit: int) -> bytes:
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise checkpoint_error(path, f"is {size} bytes long, more than the limit of {limit}")
        data = b""
        while chunk := os.read(descriptor, limit + 1 - len(data)):
            data += chunk
            if len(data) > limit:
                raise checkpoint_error(path, f"grew beyond the limit of {limit} bytes while it was read")
    except OSError as error:
        raise checkpoint_error(path, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return data


def read_json(path: str | Path, limit: int) -> dict[str, Any]:
    """Return the object in a file of at most ``limit`` bytes, or raise ``checkpoint_error``."""
    try:
        return msgspec.json.decode(read_small(path, limit), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise checkpoint_error(path, f"is not a JSON object: {error}") from error
