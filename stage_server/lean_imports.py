"""Imports without what a stage never uses: every stage server that starts in another's place pays for them.

A decoder layer's module of Transformers also brings generation, the sharding of tensors over devices and, through one
decorator each, the compiler; none of it is called to compute a stage. Within `lean_imports` those are empty stand-ins.
Afterwards they are forgotten, so a later import by name gets the real one.

Transformers also reads the source of all its models to learn which name lives in which module. A stage server imports
by module, so that catalogue stays empty in its process: there is no `from transformers import ...` afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

UNUSED = (
    "torch._dynamo",  # the compiler
    "torch.export",
    "transformers.generation.continuous_batching",
    "transformers.distributed",  # tensors sharded over devices
    "scipy",  # of losses of other models, where it is installed
)
CATALOGUE = "transformers.utils.import_utils"  # its define_import_structure reads a folder's sources
CATALOGUED = "transformers/models"


@contextmanager
def lean_imports(unused: Sequence[str] = UNUSED) -> Iterator[None]:
    """Around imports: packages in `unused` that are not loaded yet are stood in for by empty ones."""
    stand_ins, catalogue = _StandIns(unused), _EmptyCatalogue()
    sys.meta_path[:0] = [stand_ins, catalogue]
    try:
        yield
    finally:
        sys.meta_path.remove(stand_ins)
        sys.meta_path.remove(catalogue)
        stand_ins.forget()
        catalogue.forget()


class _StandIns(MetaPathFinder, Loader):
    """Finds, instead of the packages named and all that is in them, modules that have every name."""

    def __init__(self, unused: Sequence[str]) -> None:
        self._unused = unused
        self._made: list[ModuleType] = []

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if any(name == package or name.startswith(f"{package}.") for package in self._unused):
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


class _EmptyCatalogue(MetaPathFinder, Loader):
    """Loads CATALOGUE so that it finds nothing in the folder of all models; a single model's folder it reads."""

    def __init__(self) -> None:
        self._inner: Loader | None = None
        self._module: ModuleType | None = None
        self._define: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == CATALOGUE else None
        if spec is not None:
            self._inner, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._inner is not None
        self._inner.exec_module(module)
        self._module, self._define = module, module.__dict__["define_import_structure"]
        module.__dict__["define_import_structure"] = self._of

    def _of(self, path: str, prefix: str | None = None) -> Any:
        of_all = str(path).replace("\\", "/").removesuffix("/__init__.py").endswith(CATALOGUED)
        return {frozenset(): {}} if of_all else self._define(path, prefix)

    def forget(self) -> None:
        if self._module is not None:
            self._module.__dict__["define_import_structure"] = self._define


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
