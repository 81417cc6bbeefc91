"""Installs the catalog's active rows in one process of the server, or ends it with the reason."""

import importlib
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sglang_patches import masked_logs, plugin_config, verify
from sglang_patches.catalog import PATCHES
from sglang_patches.patch import Patch
from sglang_patches.plugin_config import PluginConfig

logger = logging.getLogger(__name__)


def enable(config_path: str) -> None:
    """Check SGLang's source against the catalog, install the hooks and assert that each of them applied.

    Raises SystemExit with the reason in every other case.
    """
    try:
        config = plugin_config.read(config_path)
        patches = active_patches(PATCHES, config)
    except ValueError as error:
        refuse(str(error))
    check_source(patches)
    install(patches)
    masked_logs.install()
    if config.device == "cpu" and multiprocessing.parent_process() is None:
        from sglang_patches.cpu import preload

        preload.start_fork_server()
    logger.info("flexfloor num_hooks=%d collectives=%s", len(patches), config.collectives)


def active_patches(patches: Sequence[Patch], config: PluginConfig) -> list[Patch]:
    """The rows that this server needs. Raises ValueError for a `left_out` target that is no row."""
    unknown = set(config.left_out) - {patch.target for patch in patches}
    if unknown:
        raise ValueError(f"left_out names no row of the catalog: {', '.join(sorted(unknown))}")
    return [patch for patch in patches if _is_active(patch, config)]


def check_source(patches: Sequence[Patch]) -> None:
    """Refuse when the installed SGLang is not the one that the rows were checked with."""
    try:
        root = verify.installed_root()
        version = verify.installed_version(root)
    except (ModuleNotFoundError, ValueError) as error:
        refuse(str(error))
    bad = [row for row in verify.check(patches, root, version) if row.state is not verify.RowState.ok]
    if bad:
        rows = "\n  ".join(str(row) for row in bad)
        refuse(f"SGLang {version} differs from what the hooks were checked with:\n  {rows}")


def install(patches: Sequence[Patch]) -> None:
    """Register and apply the rows' hooks now, in this process.

    Applied at once rather than left to SGLang, which logs a hook that fails to apply and serves without it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for patch in patches:
        HookRegistry.register(patch.target, load_hook(patch.hook), HookType(patch.hook_type))
    HookRegistry.apply_hooks()
    assert_applied(patches)


def assert_applied(patches: Sequence[Patch]) -> None:
    """Refuse when a hook did not apply."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [patch.target for patch in patches if patch.target not in HookRegistry._patched]
    if missing:
        refuse(f"SGLang did not apply the hooks on {', '.join(missing)}; its log above says why")


def load_hook(hook: str) -> Callable[..., Any]:
    """The function that a row's `hook` names."""
    module_name, function_name = hook.split(":")
    function: Callable[..., Any] = getattr(
        importlib.import_module(f"sglang_patches.hooks.{module_name}"), function_name
    )
    return function


def refuse(reason: str) -> NoReturn:
    """End this process. SystemExit is the one exception of a plugin that SGLang lets through."""
    raise SystemExit(f"flexfloor refuses to start: {reason}")


def _is_active(patch: Patch, config: PluginConfig) -> bool:
    return (
        patch.device in ("any", config.device)
        and patch.collectives in ("any", config.collectives)
        and patch.membership in ("any", config.membership)
        and (patch.iteration_log == "any" or bool(config.iteration_log))
        and patch.target not in config.left_out
    )
