"""The Hugging Face hub: files of a model repository, as paths in the local cache.

Thin on purpose: it gives local files. The library honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. No code of a
repository is ever run.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status

from swarm.errors import InvalidModel, NotCached, NotFound, SwarmError
from swarm.home import library_cache
from swarm.text import first_line, without_passwords

ANSWER_S_MAX = 3.0  # what a hub takes at most to connect, and then to begin to answer
PART_S_MAX = 10.0  # for each wait for a part of a file
PARTIAL = 206  # the HTTP status of such an answer
ATTEMPTS = 2
BETWEEN_ATTEMPTS_S = 0.5
CHECK_S_MAX = 8.0  # and with all attempts, the look for its address included

_COMMIT = re.compile(r"^[0-9a-f]{40}$")


class _OneLine(logging.Filter):
    """Shorten the library's two log lines per attempt to a single one."""

    def __init__(self) -> None:
        super().__init__()
        self._is_said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING or not str(record.msg).startswith(("'", "HTTP Error", "Retrying in")):
            return True
        record.msg, record.args = "the Hugging Face hub does not answer: tries again for up to half a minute", ()
        is_first, self._is_said = not self._is_said, True
        return is_first


logging.getLogger("huggingface_hub.utils._http").addFilter(_OneLine())


def fetch(repository: str, revision: str, name: str, *, with_token: bool = True) -> Path:
    """The file `name` of a model repository, downloaded if the cache lacks it.

    `with_token`: ask as the user of this machine (HF_TOKEN, login), else anonymously. NotFound if there is no such
    file, NotCached without a network; InvalidModel with the cause otherwise: no such repository or revision, no access.
    """
    token = None if with_token else False
    with _translated(repository, revision, name):
        return Path(huggingface_hub.hf_hub_download(repository, name, revision=revision, token=token))


def cached(repository: str, revision: str, name: str) -> Path | None:
    """The file `name` in the local cache; None if it is not there. Nothing is asked."""
    found = huggingface_hub.try_to_load_from_cache(repository, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def read_part(repository: str, revision: str, name: str, start: int, stop: int) -> tuple[bytes, int] | None:
    """Bytes [start, stop) of a file on the hub, fewer if it is shorter, and its size; None if they cannot be had now.

    No more is read than was asked for, even if the server sends more. NotFound if there is no such file.
    """
    try:
        with _translated(repository, revision, name):
            url = huggingface_hub.hf_hub_url(repository, name, revision=revision)
            headers = {**build_hf_headers(), "range": f"bytes={start}-{stop - 1}"}
            session = huggingface_hub.get_session()
            with session.stream("GET", url, headers=headers, timeout=PART_S_MAX, follow_redirects=True) as response:
                hf_raise_for_status(response)
                if response.status_code != PARTIAL:
                    raise ConnectionError("it gives no parts of files")
                part = bytearray()
                for piece in response.iter_raw():
                    part += piece
                    if len(part) >= stop - start:
                        break
                return bytes(part[: stop - start]), int(response.headers["content-range"].rpartition("/")[2])
    except InvalidModel:
        return None


def check_answers(repository: str, revision: str, name: str, where: str) -> None:
    """NotCached, within seconds, if the cache lacks the file `name` and nothing answers for the hub.

    The library itself tries for half a minute, which suits who downloads for hours, not a person who has just typed a
    command. Any answer will do, a refusal too. As the library does it, so through the proxy that the environment names.
    """
    if constants.HF_HUB_OFFLINE:
        return  # it says so itself, at once
    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(repository, name, revision=revision or None), str):
            return
    except errors.HFValidationError:
        return  # no id at all, which is said by who asks for it
    if (error := _unanswered()) is not None:
        place = without_passwords(constants.ENDPOINT)
        raise NotCached(
            f"{where} is not in the local cache, and the hub at {place} does not answer: {first_line(error)}",
            hint="check the network, HTTPS_PROXY and HF_ENDPOINT, and try again; or give a local folder as model.id",
        ) from error


def _unanswered() -> Exception | None:
    """Why nothing answers for the hub; None if something does. On a thread, as nothing bounds a look for an address."""
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    Thread(target=lambda: ended.put(_asked()), name="hub", daemon=True).start()
    try:
        return ended.get(timeout=CHECK_S_MAX)
    except Empty:
        return TimeoutError(f"nothing came within {CHECK_S_MAX:g} s")


def _asked() -> Exception | None:
    """The error of the last attempt; None once there is an answer."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            huggingface_hub.get_session().head(constants.ENDPOINT, timeout=ANSWER_S_MAX)
            return None
        except Exception as error:  # those of its HTTP client, which has changed before
            if attempt == ATTEMPTS:
                return error
            time.sleep(BETWEEN_ATTEMPTS_S)
    return None


def commit_of(path: Path) -> str:
    """The commit of a file that `fetch` gave: the cache keeps one folder per commit."""
    return next((parent.name for parent in path.parents if _COMMIT.match(parent.name)), "")


def names(repository: str, revision: str) -> list[str] | None:
    """The files of a repository; None if the hub cannot be asked now (offline)."""
    try:
        with _translated(repository, revision, "its list of files"):
            return list(huggingface_hub.HfApi().list_repo_files(repository, revision=revision))
    except InvalidModel:
        return None


@contextmanager
def _translated(repository: str, revision: str, name: str) -> Iterator[None]:
    where = f'model.id = "{repository}"'
    try:
        with library_cache(InvalidModel):
            yield
    except SwarmError:
        raise
    except errors.GatedRepoError as error:
        raise InvalidModel(
            f"{where} is gated: the hub gives it only to those who were granted access",
            hint=f"accept its terms at https://huggingface.co/{repository}, then set HF_TOKEN for this process",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InvalidModel(
            f"{where} is neither a local folder nor a model on the hub that this process may see",
            hint="check the id; for a private model set HF_TOKEN; a local folder is relative to where you are",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidModel(f"{where} has no revision {revision}", hint="correct model.revision") from error
    except errors.HFValidationError as error:
        raise InvalidModel(
            f"{where} is neither a local folder nor a hub id",
            hint="a hub id is NAME or OWNER/NAME; a local folder is relative to where you are",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise NotCached(
            f"{name} of {where} (revision {revision}) is not in the local cache, and the hub does not answer",
            hint="check the network, HF_HUB_OFFLINE and HF_HOME; or give a local folder as model.id",
        ) from error
    except errors.EntryNotFoundError as error:
        raise NotFound(f"{where} (revision {revision}) has no {name}") from error
    except Exception as error:  # the errors of its HTTP client come through, and that client has changed before
        raise InvalidModel(
            f"{name} of {where} cannot be had: {first_line(error)}",
            hint="check the network, HF_TOKEN and free disk space",
        ) from error
