"""The user's own code: a name in a file or a package, `"file.py:Thing"` or `"package.module:Thing"`, and what it names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from keyhole.core.errors import InputError, nearest


def load_from(name: str, folder: Path) -> Any:
    """What a name refers to; relative files are looked up in `folder`, then in the working directory."""
    place, _, attribute = name.rpartition(":")
    module = _load_file(place, folder) if place.endswith(".py") else _import(place, name)
    found = getattr(module, attribute, None)
    if found is None:
        known = [key for key, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value)]
        raise InputError(f"{place} has no {attribute!r}{nearest(attribute, known)}")
    return found


def name_of(cls: type) -> str:
    """A name by which a class that was handed over, wherever it was written, can be built in this process."""
    module = f"keyhole_given_{cls.__name__}_{id(cls):x}"
    # Kept among the modules, so the class stays and with it its id.
    vars(sys.modules.setdefault(module, ModuleType(module)))[cls.__name__] = cls
    return f"{module}:{cls.__name__}"


def resolve_file(place: str, folder: Path) -> Path:
    """A user's file, looked up beside the recipe first."""
    for base in (folder, Path.cwd()):
        if (path := (base / place)).is_file():
            return path.resolve()
    places = " or in ".join(dict.fromkeys(map(str, (folder, Path.cwd()))))
    raise InputError(f"there is no file {place} in {places}")


def _load_file(place: str, folder: Path) -> ModuleType:
    path = resolve_file(place, folder)
    source = path.read_bytes()
    # Loaded once for all layers, and afresh when its text changed.
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()
    name = f"keyhole_user_{path.stem}_{digest[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(source, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:  # a script that ends itself must not end whoever reads a part out of it
        del sys.modules[name]
        raise InputError(f"{path} could not be loaded: {type(error).__name__}: {error}") from error
    return module


def _import(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise InputError(f"{name}: the module {place!r} could not be imported ({error}); is it installed?") from error
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{name}: the module {place!r} could not be loaded: {reason}") from error
