"""The catalog, its page, and the hooks it names."""

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_patches import patches_page, plugin, verify
from sglang_patches.catalog import PATCHES
from sglang_patches.patch import Patch
from sglang_patches.plugin_config import PluginConfig

HOOKS = Path(plugin.__file__).parent / "hooks"


def targets(**config: object) -> set[str]:
    chosen = plugin.active_patches(PATCHES, PluginConfig(**config))  # type: ignore[arg-type]
    return {patch.target.rpartition(".")[2] for patch in chosen}


def test_page_is_fresh() -> None:
    assert patches_page.PAGE.read_text() == patches_page.render(PATCHES), (
        "run python -m sglang_patches.patches_page"
    )


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.hook)
def test_row_is_complete_and_its_hook_exists(patch: Patch) -> None:
    module_name = patch.hook.partition(":")[0]
    assert all((patch.why, patch.upstream, patch.remove_when, patch.process, patch.checked))
    assert module_name in patch.target.split("."), "a hook file is named like the module that it patches"
    assert callable(plugin.load_hook(patch.hook))


def test_installed_sglang_is_what_the_rows_were_checked_with() -> None:
    root = verify.installed_root()
    reports = verify.check(PATCHES, root, verify.installed_version(root))
    assert [str(report) for report in reports if report.state is not verify.RowState.ok] == []


def test_hook_files_import_nothing_heavy() -> None:
    names = [f"sglang_patches.hooks.{file.stem}" for file in HOOKS.glob("*.py") if file.stem != "__init__"]
    script = f"import {', '.join(names)}, sys; print({{'torch', 'sglang', 'numpy'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_rows_follow_device_and_collectives() -> None:
    server = {"__init__", "_dispatch_to_scheduler", "decide_request_auth"}
    assert targets(device="cuda") == {"run_batch", "get_internal_state", *server}
    assert targets(device="cuda", iteration_log="/run/log") - targets(device="cuda") == {"retract_decode"}
    assert "exchange_sync_rows" not in targets(device="cpu")
    assert "exchange_sync_rows" in targets(device="cpu", collectives="shm")
    # One row per target, or SGLang would keep one of the replacements and drop the other.
    for collectives in ("gloo", "shm"):
        active = plugin.active_patches(PATCHES, PluginConfig(device="cpu", collectives=collectives))
        assert len({patch.target for patch in active}) == len(active)


def test_rows_of_elastic_membership_are_for_elastic_servers_only() -> None:
    elastic = {patch.target for patch in PATCHES if patch.membership == "elastic"}
    assert len(elastic) >= 10
    for device, collectives in (("cpu", "gloo"), ("cpu", "shm"), ("cuda", "gloo")):
        static, whole = (
            [
                patch.target
                for patch in plugin.active_patches(
                    PATCHES, PluginConfig(device=device, collectives=collectives, membership=membership)
                )
            ]
            for membership in ("static", "elastic")
        )
        assert not elastic & set(static)
        assert set(whole) - set(static) == {
            patch.target for patch in PATCHES if patch.target in elastic and patch.device in ("any", device)
        }
        assert len(set(whole)) == len(whole)


def test_a_row_can_be_left_out_for_a_benchmark() -> None:
    target = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
    assert "moe_forward_native" not in targets(device="cpu", left_out=(target,))
    with pytest.raises(ValueError, match=r"no row of the catalog: sglang\.typo"):
        targets(device="cpu", left_out=("sglang.typo",))
