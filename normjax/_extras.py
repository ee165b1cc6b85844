"""Which extra brings what: the words said when a part of normjax is imported without its dependencies."""

import importlib.util


def require(part: str, extra: str, *modules: str) -> None:
    """Return nothing if every module can be imported; else say which ``pip install`` brings them.

    Args:
        part: What needs the modules, as the user would name it: ``"normjax.lab"``.
        extra: The extra of this package that lists them: ``"lab"``.
        *modules: Top-level names of the modules.

    Raises:
        ModuleNotFoundError: A module is missing.

    Example:
        >>> from normjax._extras import require
        >>> require("normjax.lab", "lab", "a_module_nobody_has")
        Traceback (most recent call last):
            ...
        ModuleNotFoundError: normjax.lab needs a_module_nobody_has: pip install "normjax[lab]"
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(f'{part} needs {", ".join(missing)}: pip install "normjax[{extra}]"', name=missing[0])
