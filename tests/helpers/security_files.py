"""What somebody hostile leaves in files: each of these writes a witness if anything of it is run."""

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


def module(witness: Path, path: Path) -> None:
    """Write a module that makes a file when it is imported, and again when its class is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"from pathlib import Path\nPath({str(witness)!r}).touch()\n\n\n"
        f"class Net:\n    def __init__(self, **values):\n        Path({str(witness)!r}).touch()\n"
    )


def pickled(witness: Path) -> bytes:
    """Return a pickle that makes a file."""
    return pickle.dumps({"format": 2, "model": Touch(witness)})


def checkpoint(witness: Path) -> bytes:
    """Return a file as ``torch.save`` writes it, zip and all, whose pickle makes a file."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(witness))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return memory.getvalue()


def bomb(size: int) -> bytes:
    """Return a zip file of a thousandth of the size that it unpacks to."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        with archive.open("archive/data/0", "w", force_zip64=True) as file:
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
    return memory.getvalue()


def safetensors(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with this header, true or not."""
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body
