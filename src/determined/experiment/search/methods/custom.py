"""Search methods written by users."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import types
from typing import Annotated, Any, Literal

from determined import errors
from determined._import import import_from_path
from determined._packages import explained
from determined.experiment.config._searcher import MaxConcurrentTrials, Searcher, register
from determined.experiment.config._section import key
from determined.experiment.search._method import Folder, SearchMethod, Setup


@register
class CustomSearcher(Searcher):
    """A search method of your own, in Python."""

    name: Literal["custom"] = "custom"
    method: Annotated[
        str,
        key(
            "The class, as `module:Class`.",
            "my_search:Method",
            pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$",
        ),
    ]
    max_concurrent_trials: MaxConcurrentTrials = 16
    options: Annotated[dict[str, Any], key("Passed to the method unchanged.", {"patience": 3})] = {}

    def build(self, setup: Setup) -> SearchMethod:
        """Return the user's search method, imported from the folder of the setup."""
        return load_method(self.method, setup.folder)(setup)


def load_method(method: str, folder: Folder) -> type[SearchMethod]:
    """Return the class that `module:Class` names, imported from the folder first.

    Modules of the folder are removed from `sys.modules` afterwards, so the method's module should import what it
    needs at its top.
    """
    module_name, _, class_name = method.partition(":")
    with import_from_path(folder):
        module = _module(method, module_name, folder)
        found = _attribute(method, module, class_name)
    if not (inspect.isclass(found) and issubclass(found, SearchMethod)):
        raise _refusal(method, f"{found!r} is not a search method", "Make it a class that inherits from SearchMethod")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise _refusal(method, f"{class_name} lacks {missing}", f"Define {missing} in the class")
    return found


def _module(method: str, name: str, folder: Folder) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _refusal(
                method, f"importing it failed: {explained(str(error))}", "Install it, or take the import out"
            ) from error
        raise _refusal(
            method, f"there is no module {error.name!r} in {os.fspath(folder)}", "Put its file into the code folder"
        ) from error
    except Exception as error:
        problem = f"importing it failed: {type(error).__name__}: {error}"
        raise _refusal(method, problem, "Fix the module, or name another one") from error


def _attribute(method: str, module: types.ModuleType, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            methods = [
                name for name, its in inspect.getmembers(found, inspect.isclass) if issubclass(its, SearchMethod)
            ]
            near = difflib.get_close_matches(part, methods, 1) or methods
            there = f"; search methods there: {', '.join(near)}" if near else ""
            raise _refusal(method, f"there is no {part!r}{there}", "Write module:Class, such as my_search:Method")
        found = getattr(found, part)
    return found


def _refusal(method: str, problem: str, remedy: str) -> errors.InvalidExperimentException:
    return errors.InvalidExperimentException(f"searcher.method={method!r}: {problem}. {remedy}.")
