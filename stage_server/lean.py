"""Imports without what a stage never uses: every stage server that starts in another's place pays for them.

A decoder layer's module of Transformers also brings generation, the sharding of tensors over devices and, through
one decorator each, the compiler: half of all time that importing takes, and none of it is called to compute a stage.
Within `lean_imports` those are empty stand-ins; afterwards they are forgotten, so that whoever imports one by its name
gets the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The compiler; continuous batching of generated text; tensors sharded over devices.
UNUSED = ("torch._dynamo", "transformers.generation.continuous_batching", "transformers.distributed")


@contextmanager
def lean_imports(unused: Sequence[str] = UNUSED) -> Iterator[None]:
    """Around imports: packages in `unused` that are not loaded yet are stood in for by empty ones."""
    stand_ins = _StandIns(unused)
    sys.meta_path.insert(0, stand_ins)
    try:
        yield
    finally:
        sys.meta_path.remove(stand_ins)
        stand_ins.forget()


class _StandIns(MetaPathFinder, Loader):
    """Finds, instead of the packages named and all that is in them, modules that have every name."""

    def __init__(self, unused: Sequence[str]) -> None:
        self._unused = unused
        self._made: list[ModuleType] = []

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if any(name == one or name.startswith(f"{one}.") for one in self._unused):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._made.append(_StandIn(spec.name))
        return self._made[-1]

    def exec_module(self, module: ModuleType) -> None:
        pass

    def forget(self) -> None:
        for module in self._made:
            sys.modules.pop(module.__name__, None)
            parent, _, leaf = module.__name__.rpartition(".")
            names = sys.modules[parent].__dict__ if parent in sys.modules else {}
            if names.get(leaf) is module:
                del names[leaf]


class _StandIn(ModuleType):
    """A module whose every name is a class without instances: fit for annotations and `isinstance`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__new__": _undecorated})
        setattr(self, name, made)
        return made


def _undecorated(_: type, target: object = None, *args: object, **kwargs: object) -> object:
    """Called as a decorator, with or without arguments, give back what is decorated."""
    return target if callable(target) else lambda function: function
