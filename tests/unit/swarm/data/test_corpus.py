"""swarm.data.corpus: who reads what people train on."""

from __future__ import annotations

import json
import subprocess
import sys

# All modules of a program, and what they load.
LOADED = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(package.__path__, f"{sys.argv[1]}."):
    if found.name.rpartition(".")[2] not in ("__main__", "env") and ".versions" not in found.name:
        importlib.import_module(found.name)
readers = ("swarm.data.corpus", "swarm.data.documents", "swarm.data.shards", "swarm.data.tokenizer")
print(json.dumps([name for name in readers if name in sys.modules]))
"""


def test_no_server_reads_texts_and_tokenizers() -> None:
    """They are read without bounds, on the machine of the person who chose them."""
    for program in ("scheduler", "stage_server"):
        done = subprocess.run([sys.executable, "-c", LOADED, program], stdout=subprocess.PIPE, check=True)
        assert json.loads(done.stdout) == [], program
