"""Whether transformers.AutoTokenizer would cut texts as the job's tokenizer does.

A job's tokens come from tokenizer.json as it is. For some families transformers 5 takes only vocabulary and merges from
that file, and builds the rest anew. A person who loads the pulled model would then give it other tokens than it was
trained on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from swarm.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from swarm.process.temporary import temporary_folder
from swarm.text import counted, printable

LOOK_S_MAX = 15.0  # beyond what sending takes; the job waits for it
LOOK_CPU_S_MAX, LOOK_BYTES_MAX = 120, 6 << 30
# Of ours, which may hold tokens and passwords: the process reads what strangers wrote.
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
# Whitespace, code, numbers, contractions, accents in both forms, other scripts: here rules of tokenizers differ.
PROBE = (
    "def f(x):\n    return x * 1234567  # na\u00efve cafe\u0301\n\n\nI'm sure WE'LL see; it's 3.14 \u20ac,  don't!\r\n"
    "\tthe Quick brown-fox_jumps over 42 dogs... \u65e5\u672c\u8a9e \u041f\u0440\u0438\u0432\u0435\u0442 \U0001f642 "
)
# Run in a process of its own: the client has no torch. Code of a tokenizer's folder never runs.
_PROGRAM = f"""
import json, resource, sys
for what, most in ((resource.RLIMIT_CPU, {LOOK_CPU_S_MAX}), (resource.RLIMIT_AS, {LOOK_BYTES_MAX})):
    try:
        resource.setrlimit(what, (most, most))
    except (ValueError, OSError):  # macOS
        pass
from transformers import AutoTokenizer
found = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
print(json.dumps([type(found).__name__, found(sys.argv[2], add_special_tokens=False)["input_ids"]]))
"""


@contextmanager
def looking_at_auto_tokenizer(tokenizer: Tokenizer, family: str) -> Iterator[Callable[[], str]]:
    """Gives a function that waits for a sentence if AutoTokenizer would cut the probe otherwise.

    The sentence is empty if it would not, and if transformers is not installed or cannot tell. Meanwhile a process
    looks, which ends with the block.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer) or find_spec("transformers") is None:
        yield lambda: ""
        return
    with temporary_folder("swarm-tokenizer-") as folder:
        for name, content in tokenizer.tokenizer_files().items():
            (folder / name).write_bytes(content)
        (folder / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
        command = [sys.executable, "-P", "-c", _PROGRAM, str(folder), PROBE]
        quiet = subprocess.DEVNULL
        ours = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"HF_HUB_OFFLINE": "1"}
        with subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True, env=ours) as child:
            try:
                yield lambda: _told(tokenizer, child)
            finally:
                child.kill()


def _told(tokenizer: Tokenizer, child: subprocess.Popen[str]) -> str:
    try:
        out, _ = child.communicate(timeout=LOOK_S_MAX)
        name, theirs = json.loads(out.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, LookupError):
        return ""
    (ours,) = tokenizer.encode_batch([PROBE])
    if theirs == ours.tolist():
        return ""
    return (
        f"the job's tokens are those of tokenizer.json, of which transformers.AutoTokenizer makes a {printable(name)} "
        f"that cuts text otherwise ({counted(len(ours), 'token')} against {len(theirs)} in a sample): load "
        "the model's tokenizer with transformers.PreTrainedTokenizerFast"
    )
