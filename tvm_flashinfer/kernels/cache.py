"""The folder of built kernels: content-addressed, safe for many processes, and checked when read.

An entry is a file and a manifest with its size and hash. The file is put in place first, the
manifest last, each by one rename: a builder that dies at any moment leaves nothing that is taken
for an entry. A lock on each entry makes two processes build it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_flashinfer.kernels.errors import CacheError

try:
    import fcntl
except ImportError:  # Windows, where no kernels are built
    fcntl = None  # type: ignore[assignment]

#: Names the folder to use in place of the default one.
CACHE_VARIABLE = "TVM_FLASHINFER_CACHE_DIR"

#: What a killed builder left behind is removed when it is that old.
_STALE_SECONDS = 24 * 3600

_KEY_LENGTH = 24

#: How often a lock that another process holds is tried again.
_POLL_SECONDS = 0.1

Notice = Callable[[str], None]
Check = Callable[[], None]


def default_cache_dir() -> Path:
    """Return ``$TVM_FLASHINFER_CACHE_DIR``, or this package's folder in the user's cache folder.

    Raises
    ------
    CacheError
        The user has no home folder and the variable is not set.
    """
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as error:
        raise CacheError(
            f"this user has no home folder ({error}); set {CACHE_VARIABLE} to a folder for built "
            "kernels"
        ) from error
    return root / "tvm_flashinfer"


def digest(parts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what an entry is made from, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    state = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


@dataclass(frozen=True)
class Entry:
    """A built file.

    Attributes
    ----------
    path : Path
        The file.
    name : str
        What it is, such as ``"batch_decode_f16_d128_sm90a"``.
    size : int
        Bytes.
    used : float
        When it was last asked for, in seconds since the epoch.
    """

    path: Path
    name: str
    size: int
    used: float


class KernelCache:
    """A folder of built kernels.

    Parameters
    ----------
    root : Path, optional
        The folder; `default_cache_dir` when it is left out. It is created, for this user alone,
        when something is first built.

    Raises
    ------
    CacheError
        The folder belongs to another user or anyone may write to it: kernels are code, and whoever
        writes here runs code as this user.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = default_cache_dir() if root is None else Path(root).absolute()
        self._check_owner()

    def lookup(self, folder: str, name: str, key: str, suffix: str) -> Path | None:
        """Return a built file, or None when it is missing or damaged."""
        path = self._path(folder, name, key, suffix)
        try:
            manifest = json.loads(_manifest(path).read_text())
            intact = (
                manifest["key"] == key
                and manifest["size"] == path.stat().st_size
                and manifest["sha256"] == file_digest(path)
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not intact:
            return None
        with contextlib.suppress(OSError):  # a folder that this user may only read
            os.utime(_manifest(path))
        return path

    def get_or_build(
        self,
        folder: str,
        name: str,
        key: str,
        suffix: str,
        build: Callable[[Path], None],
        notice: Notice | None = None,
        check: Check | None = None,
    ) -> tuple[Path, bool]:
        """Return a built file and whether this call built it.

        Parameters
        ----------
        folder : str
            Folder inside the cache, such as ``"objects"``.
        name : str
            What the file is, for its name.
        key : str
            Digest of all that it is made from.
        suffix : str
            Such as ``".o"``.
        build : callable
            Writes the file to the path that it is given, in a folder for temporary files.
        notice : callable, optional
            Is told when another process builds the same file.
        check : callable, optional
            Is called while waiting for it, and may raise to wait no longer.

        Raises
        ------
        CacheError
            The folder cannot be written.
        """
        if path := self.lookup(folder, name, key, suffix):
            return path, False
        with self.lock(key, f"{name} is being built by another process; waiting", notice, check):
            if path := self.lookup(folder, name, key, suffix):
                return path, False
            path = self._path(folder, name, key, suffix)
            with self.work_dir() as work:
                built = work / ("built" + suffix)
                build(built)
                with self._writing():
                    path.parent.mkdir(exist_ok=True)
                    manifest = {
                        "name": name,
                        "key": key,
                        "size": built.stat().st_size,
                        "sha256": file_digest(built),
                    }
                    (work / "manifest").write_text(json.dumps(manifest))
                    os.replace(built, path)
                    os.replace(work / "manifest", _manifest(path))
            return path, True

    @contextlib.contextmanager
    def lock(
        self,
        key: str,
        waiting: str,
        notice: Notice | None = None,
        check: Check | None = None,
    ) -> Iterator[None]:
        """Hold the lock of one entry, which the system frees when the process ends, however."""
        if fcntl is None:
            raise CacheError("kernels are built on Linux only")
        self._create()
        path = self.root / "locks" / key[:_KEY_LENGTH]
        with self._writing():
            descriptor = _lock_file(path, waiting, notice, check)
        try:
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep `prune` of any process from removing entries meanwhile."""
        descriptor: int | None = None
        # A folder that this user may only read cannot be pruned by this user either.
        with contextlib.suppress(OSError, CacheError):
            self._create()
            descriptor = _open_lock(self.root / "locks" / "prune")
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @contextlib.contextmanager
    def work_dir(self) -> Iterator[Path]:
        """Give a folder for temporary files, on the disk of the cache; it is removed afterwards."""
        self._create()
        with self._writing():
            work = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def entries(self) -> list[Entry]:
        """Return what is in the cache, by name."""
        found = []
        for manifest in self.root.glob("*/*.json"):
            try:
                name, size = (json.loads(manifest.read_text())[k] for k in ("name", "size"))
                used = manifest.stat().st_mtime
            except (OSError, ValueError, KeyError, TypeError):
                continue
            found.append(Entry(manifest.with_suffix(""), name, size, used))
        return sorted(found, key=lambda entry: (entry.name, entry.path))

    def prune(self, older_than_days: float = 0, notice: Notice | None = None) -> tuple[int, int]:
        """Remove entries that were not asked for in some days, and what killed builders left.

        Waits for builds to end. Processes that have loaded a removed library keep it.

        Parameters
        ----------
        older_than_days : float
            0 removes every entry.
        notice : callable, optional
            Is told when it waits.

        Returns
        -------
        count, size : int
            How many entries were removed, and their bytes.
        """
        if not self.root.is_dir():
            return 0, 0
        limit = time.time() - older_than_days * 24 * 3600
        count = size = 0
        with self.lock("prune", "waiting for builds to end", notice):
            for entry in self.entries():
                if entry.used > limit:
                    continue
                with self._writing():
                    # The manifest goes first: without it the file is no entry.
                    _manifest(entry.path).unlink(missing_ok=True)
                    entry.path.unlink(missing_ok=True)
                count, size = count + 1, size + entry.size
        return count, size

    def _remove_stale(self) -> None:
        limit = time.time() - _STALE_SECONDS
        for folder in (self.root / "tmp").glob("*"):
            with contextlib.suppress(OSError):
                if folder.stat().st_mtime < limit:
                    shutil.rmtree(folder, ignore_errors=True)

    def _path(self, folder: str, name: str, key: str, suffix: str) -> Path:
        return self.root / folder / f"{name}-{key[:_KEY_LENGTH]}{suffix}"

    def _check_owner(self) -> None:
        """Raise when others may put files into the folder or into those that it holds."""
        try:
            status = self.root.stat()
            if not stat.S_ISDIR(status.st_mode):
                raise CacheError(
                    f"{self.root} is not a folder; set {CACHE_VARIABLE} to a folder for built "
                    "kernels"
                )
            _check_folder(self.root, status)
            with os.scandir(self.root) as entries:
                for entry in entries:
                    if entry.is_dir():
                        _check_folder(Path(entry.path), entry.stat())
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unusable(self.root, error) from error

    def _create(self) -> None:
        with self._writing():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("locks", "tmp"):
                (self.root / name).mkdir(exist_ok=True)
            self._remove_stale()
        self._check_owner()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _unusable(self.root, error) from error


def _check_folder(folder: Path, status: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"the folder of built kernels, {folder}, belongs to user {status.st_uid} and "
            f"this process runs as user {os.geteuid()}. Kernels are code, so another user's "
            f"are not loaded; set {CACHE_VARIABLE} to a folder of your own."
        )
    if status.st_mode & stat.S_IWOTH:
        raise CacheError(
            f"anyone may write to the folder of built kernels, {folder} (mode "
            f"{stat.S_IMODE(status.st_mode):o}). Kernels are code: run `chmod 700` on it, or "
            f"set {CACHE_VARIABLE} to another folder."
        )


def _unusable(root: Path, error: OSError) -> CacheError:
    return CacheError(
        f"the folder of built kernels, {root}, cannot be used: {error}. Set {CACHE_VARIABLE} to a "
        "folder that this user may write to."
    )


def _manifest(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _lock_file(path: Path, waiting: str, notice: Notice | None, check: Check | None) -> int:
    """Open and lock a file; return its descriptor."""
    descriptor = _open_lock(path)
    try:
        told = False
        while not _try_lock(descriptor):
            if notice is not None and not told:
                notice(waiting)
            told = True
            if check is not None:
                check()
            time.sleep(_POLL_SECONDS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
