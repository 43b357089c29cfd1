"""Calling a function with a module right after that has been imported."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class HookWarning(UserWarning):
    """The hook at ``import tvm`` did not do its work."""


def when_imported(name: str, action: Action) -> None:
    """Call a function with a module: now when it is imported already, else right after its import.

    An action that raises is warned of; the import succeeds.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    finder = _finder()
    if finder is None:
        finder = _WhenImported()
        sys.meta_path.insert(0, finder)
    finder.actions.setdefault(name, []).append(action)


def forget(name: str) -> None:
    """Let a module be imported without the function that was to be called then."""
    finder = _finder()
    if finder is not None:
        finder.drop(name)


def _finder() -> _WhenImported | None:
    return next((found for found in sys.meta_path if isinstance(found, _WhenImported)), None)


class _WhenImported(MetaPathFinder):
    """Stands before the other finders as long as it waits for a module."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def drop(self, name: str) -> list[Action]:
        actions = self.actions.pop(name, [])
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)
        return actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        actions = self.drop(fullname)
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            for action in actions:
                try:
                    action(module)
                except Exception as error:  # the import is the importer's, and it succeeded
                    warnings.warn(f"{fullname} stays as it is: {error}", HookWarning, stacklevel=2)

        spec.loader.exec_module = execute_then_act
        return spec
