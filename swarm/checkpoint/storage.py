"""Where checkpoints are kept: a folder on this machine, or an object store by its URL (s3://, gs://).

Both keep named folders of files, and a folder appears whole or not at all:

    local    name.tmp-TAG/…, every file fsynced; manifest, fsync; rename to name; fsync the parent
    URL      the files as name/…; the manifest object last: without it there is nothing

and a small file `latest` that is replaced as a whole. `Files` holds every local operation that durability depends on,
so that a test can stop the process before or after each one, cut it short, or let it fail.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import fsspec

from swarm.errors import InvalidConfig, StorageError, SwarmError
from swarm.process.logs import get_logger
from swarm.text import printable, without_passwords

MANIFEST = "manifest.json"
LATEST = "latest"
TEMPORARY = ".tmp-"
TRASH = ".trash-"
SCHEMES = frozenset({"s3", "gs"})
_NOT_PLAIN = "*?[]{}#%\\"  # in the names of a URL
LOCAL_SCHEMES = frozenset({"file", "local"})

_log = get_logger("storage")


class Sink(Protocol):
    """A file that is being written."""

    def write(self, content: bytes | memoryview) -> None: ...

    def pause(self) -> None:
        """More may come, or not: hold no file of the system open meanwhile, where that can be."""

    def finish(self) -> None:
        """Close it; its content is durable (local) or complete (URL)."""

    def abort(self) -> None:
        """Close it, unread."""


class Draft(Protocol):
    """A folder that is being written; readers do not see it before `publish`."""

    def create(self, path: str) -> Sink:
        """Begin a file; one that is there already is replaced."""

    def publish(self, manifest: bytes) -> None:
        """Make the folder complete: the manifest is the mark."""

    def discard(self) -> None:
        """Remove what was written, as far as possible."""


class Storage(Protocol):
    """Folders of files under one root. Every method may raise StorageError."""

    where: str  # for people

    def names(self) -> list[str]:
        """The folders in the root, without drafts and without those being removed."""

    def open(self, path: str) -> tuple[BinaryIO, int]:
        """A regular file for reading, and its size in bytes; symbolic links are refused."""

    def begin(self, name: str, tag: str) -> Draft: ...

    def remove(self, name: str) -> None:
        """Remove a folder; it stops being complete at once."""

    def point(self, name: str) -> None:
        """Let `latest` name a folder."""

    def clean(self) -> None:
        """Remove what interrupted writers left behind."""


def local_folder(where: str, schemes: Set[str] = SCHEMES) -> Path | None:
    """The folder that `where` names, None for a URL of a kind in `schemes`; InvalidConfig for anything else.

    Any submitter chooses a checkpoint.dir, and fsspec would dial a host, chain file systems, or take a password from
    it. Nothing is touched or dialled here.
    """
    scheme, mark, rest = where.partition("://")
    hint = f"use a folder, or a URL of {', '.join(f'{name}://' for name in sorted(schemes))}"
    if "\0" in where:
        raise InvalidConfig("checkpoint.dir has a character that no folder's name can have", hint=hint)
    if where.startswith("/"):  # whatever follows is a part of a folder's name
        return Path(where)
    if "::" in where:
        raise InvalidConfig("checkpoint.dir is one folder or one URL, not a chain with ::", hint=hint)
    if not mark or "/" in scheme:
        return Path(where)
    if scheme in LOCAL_SCHEMES:
        return Path(rest)
    if scheme not in schemes:
        raise InvalidConfig(f"checkpoints are not kept at {scheme[:20]}://", hint=hint)
    if "@" in rest.partition("/")[0]:
        raise InvalidConfig(
            f"checkpoint.dir = {scheme}://… carries a password, which everybody could read",
            hint="give it to the scheduler in its environment",
        )
    return None


def url_parts(where: str, schemes: Set[str] = SCHEMES) -> tuple[str, ...]:
    """The kind, the bucket and the names of a URL that `local_folder` takes for one; InvalidConfig for names that a
    server, a proxy or fsspec may read as another place: `..`, patterns, versions, and what is written in two ways.
    """
    scheme, _, rest = where.partition("://")
    parts = (scheme, *rest.removesuffix("/").split("/"))
    if scheme not in schemes or any(not _is_plain(part) for part in parts):
        raise InvalidConfig(
            f'checkpoint.dir = "{printable(without_passwords(where))[:200]}" is no plain URL',
            hint=f"write it as KIND://BUCKET/NAME/NAME, without . and .. and // and {' '.join(_NOT_PLAIN)}",
        )
    return parts


def _is_plain(part: str) -> bool:
    return part not in ("", ".", "..") and part.isprintable() and not set(part) & set(_NOT_PLAIN)


def check_absolute(where: str) -> None:
    """InvalidConfig for a checkpoint.dir that is a relative path."""
    folder = local_folder(where)
    if where and folder is not None and not folder.is_absolute():
        raise InvalidConfig(
            f'checkpoint.dir = "{where}" is relative, and the scheduler has no folder of yours',
            hint="give an absolute folder that the scheduler can write, a URL, or leave it out",
        )


def open_storage(where: str, schemes: Set[str] = SCHEMES) -> Storage:
    """The storage at a folder or URL; InvalidConfig as `local_folder`, or if a package is missing.

    It may dial for credentials, which takes seconds: never call it on an event loop.
    """
    if (folder := local_folder(where, schemes)) is not None:
        return LocalStorage(folder)
    scheme = where.partition("://")[0]
    try:
        filesystem, root = fsspec.core.url_to_fs(where)
    except ImportError as error:
        raise InvalidConfig(
            f"{where}: {scheme}:// needs a package that is not installed: {error}",
            hint="install it where the scheduler runs, then start the scheduler again; or use a folder",
        ) from None
    except Exception as error:  # each file system of fsspec raises what it likes
        told = _told(where, error)
        raise InvalidConfig(f"{where} cannot be used: {told}", hint="use a folder, s3://… or gs://…") from None
    return RemoteStorage(filesystem, root.rstrip("/"), where)


def _put(sink: Sink, content: bytes) -> None:
    try:
        sink.write(content)
        sink.finish()
    except BaseException:
        sink.abort()
        raise


# A folder on this machine ---------------------------------------------------------------------------------------------


class Files:
    """The local operations that durability depends on."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        return open(os.open(path, flags, 0o666), "wb", buffering=0)

    def reopen(self, path: Path) -> BinaryIO:
        return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK), "wb", buffering=0)

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]

    def sync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()


class LocalStorage:
    """Folders below `root`. `chosen` is the part of `root` that a person named, by default all of it.

    What is below `chosen` was made by this class. Where others may write too, as in /scratch, somebody could plant a
    link there first: nothing is written or removed behind one.
    """

    def __init__(self, root: Path, files: Files | None = None, *, chosen: Path | None = None) -> None:
        self.root = root
        self.where = str(root)
        self.files = files or Files()
        self._chosen = root if chosen is None else chosen

    def check_made(self, folder: Path) -> None:
        """StorageError if a folder between `chosen` and this one is a symbolic link."""
        place = self._chosen
        for part in folder.relative_to(self._chosen).parts:
            place = place / part
            if place.is_symlink():
                raise StorageError(f"{place} is a symbolic link", hint="only real folders are written; remove the link")

    def names(self) -> list[str]:
        with _local(self.where):
            try:
                names = os.listdir(self.root)
            except FileNotFoundError:
                return []
            return sorted(name for name in names if not name.startswith(".") and TEMPORARY not in name)

    def open(self, path: str) -> tuple[BinaryIO, int]:
        with _local(path):
            place = self.root
            for part in path.split("/"):
                place = place / part
                mode = place.lstat().st_mode
                if stat.S_ISLNK(mode):
                    raise StorageError(f"{path}: {part} is a symbolic link", hint="only real files are read")
            if not stat.S_ISREG(mode):
                raise StorageError(f"{path} is no regular file", hint="only real files are read")
            # Non-blocking and without following: it may have been replaced by a pipe or a link meanwhile.
            file = cast(BinaryIO, os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"))
            return file, os.fstat(file.fileno()).st_size

    def begin(self, name: str, tag: str) -> Draft:
        with _local(self.where):
            self.check_made(self.root)
            missing: list[Path] = []
            while not (place := missing[-1].parent if missing else self.root).is_dir():
                missing.append(place)
            for folder in reversed(missing):
                self.files.make_folder(folder)
                self.files.sync_folder(folder.parent)
        return _LocalDraft(self, name, tag)

    def remove(self, name: str) -> None:
        trash = self.root / f"{TRASH}{name}"
        with _local(name):
            self.check_made(self.root)
            self._remove_tree(trash)
            self.files.rename(self.root / name, trash)
            self.files.sync_folder(self.root)
            self._remove_tree(trash)

    def point(self, name: str) -> None:
        temporary = self.root / f"{LATEST}{TEMPORARY}0"
        with _local(LATEST):
            self.check_made(self.root)
            with self.files.create(temporary) as file:
                self.files.write(file, f"{name}\n".encode())
                self.files.sync(file)
            self.files.rename(temporary, self.root / LATEST)
            self.files.sync_folder(self.root)

    def clean(self) -> None:
        with _local(self.where):
            self.check_made(self.root)
            with suppress(FileNotFoundError):
                for name in os.listdir(self.root):
                    if TEMPORARY in name or name.startswith(TRASH):
                        self._remove_tree(self.root / name)

    def _remove_tree(self, path: Path) -> None:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            for name in sorted(os.listdir(path)):
                self._remove_tree(path / name)
            self.files.remove_folder(path)
        else:
            self.files.unlink(path)


class _LocalDraft:
    def __init__(self, storage: LocalStorage, name: str, tag: str) -> None:
        self._storage = storage
        self._files = storage.files
        self._name = name
        self._folder = storage.root / f"{name}{TEMPORARY}{tag}"
        self._folders = {storage.root}  # made, and not yet synced

    def create(self, path: str) -> Sink:
        place = self._folder / path
        with _local(path):
            self._storage.check_made(place.parent)
            self._files.make_folder(place.parent)
            self._folders |= {place.parent, self._folder}
            return _LocalSink(self._files, place, path)

    def publish(self, manifest: bytes) -> None:
        with _local(self._name):
            for folder in sorted(self._folders - {self._storage.root}, reverse=True):
                self._files.sync_folder(folder)
            _put(self.create(MANIFEST), manifest)
            self._files.sync_folder(self._folder)
            self._files.rename(self._folder, self._storage.root / self._name)
            self._files.sync_folder(self._storage.root)

    def discard(self) -> None:
        with suppress(OSError):
            self._storage._remove_tree(self._folder)


class _LocalSink:
    def __init__(self, files: Files, place: Path, path: str) -> None:
        self._files, self._place, self._path = files, place, path
        self._file = files.create(place)

    def write(self, content: bytes | memoryview) -> None:
        with _local(self._path):
            self._files.write(self._opened(), content)

    def pause(self) -> None:
        self.abort()

    def finish(self) -> None:
        with _local(self._path):
            try:
                self._files.sync(self._opened())
            finally:
                self._file.close()

    def abort(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _opened(self) -> BinaryIO:
        if self._file.closed:
            self._file = self._files.reopen(self._place)
        return self._file


@contextmanager
def _local(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free disk space there" if full else "check that the folder exists and is writable"
        reason = "disk_full" if full else "storage"
        raise StorageError(f"{what}: {error.strerror or error}", hint=hint, reason=reason) from error


# A URL ----------------------------------------------------------------------------------------------------------------


class RemoteStorage:
    def __init__(self, filesystem: Any, root: str, where: str) -> None:
        self._filesystem = filesystem
        self._root = root
        self.where = where

    def names(self) -> list[str]:
        with _remote(self.where):
            self._filesystem.invalidate_cache()
            try:
                paths = self._filesystem.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def open(self, path: str) -> tuple[BinaryIO, int]:
        with _remote(path):
            place = f"{self._root}/{path}"
            facts = self._filesystem.info(place)
            if facts["type"] != "file":
                raise StorageError(f"{path} is no file")
            return cast(BinaryIO, self._filesystem.open(place, "rb")), int(facts["size"])

    def begin(self, name: str, tag: str) -> Draft:
        return _RemoteDraft(self, name)

    def remove(self, name: str) -> None:
        with _remote(name):
            # The mark first: what is half removed must not look complete.
            with suppress(FileNotFoundError):
                self._filesystem.rm_file(f"{self._root}/{name}/{MANIFEST}")
            with suppress(FileNotFoundError):
                self._filesystem.rm(f"{self._root}/{name}", recursive=True)

    def point(self, name: str) -> None:
        _put(self.create(LATEST), f"{name}\n".encode())

    def clean(self) -> None:
        """Does nothing: a folder without a manifest is removed once a newer checkpoint is complete."""

    def create(self, path: str) -> Sink:
        place = f"{self._root}/{path}"
        with _remote(path):
            self._filesystem.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
            return _RemoteSink(self._filesystem.open(place, "wb"), path)


class _RemoteDraft:
    def __init__(self, storage: RemoteStorage, name: str) -> None:
        self._storage = storage
        self._name = name

    def create(self, path: str) -> Sink:
        return self._storage.create(f"{self._name}/{path}")

    def publish(self, manifest: bytes) -> None:
        _put(self._storage.create(f"{self._name}/{MANIFEST}"), manifest)

    def discard(self) -> None:
        with suppress(StorageError):
            self._storage.remove(self._name)


class _RemoteSink:
    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path

    def write(self, content: bytes | memoryview) -> None:
        with _remote(self._path):
            self._file.write(content)

    def pause(self) -> None:
        """A remote file cannot be opened again."""

    def finish(self) -> None:
        with _remote(self._path):
            self._file.close()

    def abort(self) -> None:
        discard: Callable[[], None] = getattr(self._file, "discard", self._file.close)
        with suppress(Exception):
            discard()


@contextmanager
def _remote(what: str) -> Iterator[None]:
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:  # botocore's, aiohttp's, google's: each file system raises what it likes
        hint = "check the URL and its access; the log of the process that uses it has the details"
        raise StorageError(f"{what}: {_told(what, error)}", hint=hint) from error


def _told(what: str, error: Exception) -> str:
    """The kind of the error. Its text goes to our own log only, because a stranger's server may have written it."""
    _log.warning("storage failed", what=what, error=repr(error)[:1000])
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return type(error).__name__
