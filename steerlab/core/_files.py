"""Text files: read in the encoding that their byte-order mark states, written atomically.

Only a line feed ends a line, alone or after a carriage return; other signs that some programs break lines at, such as
a form feed or U+2029, are part of the text.
"""

import codecs
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from steerlab.core._characters import check_whole
from steerlab.core._warning import warn
from steerlab.core.errors import DataError, InputError

_CHUNK = 1 << 18
_LONGEST_NAME = 4096
_MARKS = {  # UTF-32's first: it begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_text(path: str | Path) -> str:
    """The text of a file as it stands: UTF-8, or what its byte-order mark says; the mark is left out.

    Raises:
        DataError: if it cannot be read; with its line, if it is not text.
    """
    data = b"".join(_pieces(path))
    encoding = _encoding(data)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise _not_text(path, data[: error.start].decode(encoding, "replace"), error) from error


def warn_of_file_name(text: object, instead: str) -> None:
    """Warns of a text that is the name of a file here, whose content was perhaps meant.

    Args:
        text: what was given as a text.
        instead: how to give the file's content, `{name}` in it for the name.
    """
    if not isinstance(text, str) or "\n" in text or len(text) > _LONGEST_NAME:
        return
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):
        return
    if is_file:
        warn(
            f"{text!r} is taken as a text, and is also the name of a file. For what the file holds give "
            f"{instead.format(name=repr(text))}."
        )


def read_chunks(path: str | Path) -> Iterator[str]:
    """The text of a file in chunks, as `read_text` reads it, but with line feeds alone at line ends.

    Raises:
        DataError: if it cannot be read; with its line, if it is not text.
    """
    decoder, held, n_lines = None, "", 0
    for piece in _pieces(path):
        decoder = decoder or codecs.getincrementaldecoder(_encoding(piece))()
        held, text = _decoded(path, decoder, held, piece, n_lines)
        n_lines += text.count("\n")
        yield text
    if decoder is not None:
        yield "".join(reversed(_decoded(path, decoder, held, b"", n_lines)))


def _decoded(path: str | Path, decoder: codecs.IncrementalDecoder, held: str, piece: bytes, n: int) -> tuple[str, str]:
    """A carriage return held back in case a line feed follows, and the text to give out."""
    try:
        text = held + decoder.decode(piece, final=not piece)
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode(error.encoding, "replace")
        raise _not_text(path, "\n" * n + before, error) from error
    text = text.replace("\r\n", "\n")
    cut = len(text) - text.endswith("\r")
    return text[cut:], text[:cut]


def _pieces(path: str | Path) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(_CHUNK):
                yield piece
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"Cannot read {path}: {reason}.") from error
    except TypeError as error:
        raise DataError(f"A file's path is a string or a Path, got {path!r:.80}.") from error


def _encoding(data: bytes) -> str:
    return next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8")


def _not_text(path: str | Path, before: str, error: UnicodeDecodeError) -> DataError:
    line, name = before.count("\n") + 1, error.encoding.upper().removesuffix("-SIG")
    return DataError(
        f"Cannot read {path}: line {line} is not {name} text, the byte 0x{error.object[error.start]:02x} does not "
        "belong there. Save the file as UTF-8."
    )


def write_atomic(path: str | Path, data: bytes | str) -> Path:
    """Writes a file through a temporary one beside it and a rename; makes the parent folder.

    Returns:
        The path written.

    Raises:
        InputError: if the file cannot be written there, or the text holds half a character.
    """
    path = Path(path)
    payload = encoded(data, path)
    try:
        return _write(path, payload)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise InputError(f"Cannot write {str(path)!r}: {reason}.") from error


def encoded(data: bytes | str, path: str | Path) -> bytes:
    """What a file is to hold, as bytes.

    Raises:
        InputError: for text that holds half a character.
    """
    if isinstance(data, bytes):
        return data
    check_whole(data, f"What is to be written to {path}", InputError)
    return data.encode("utf-8")


def _write(path: Path, payload: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def remove_leftovers(folder: str | Path, *names: str) -> None:
    """Removes the temporary files that `write_atomic` left in a folder because its process was killed.

    Only for files that nobody else is writing.

    Args:
        folder: the folder.
        *names: patterns of the names of the files that were being written.
    """
    for name in names:
        for leftover in Path(folder).glob(f".{name}.*.tmp"):
            leftover.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
