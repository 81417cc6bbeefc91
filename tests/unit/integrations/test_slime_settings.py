"""Keys of slime's --custom-config-path."""

from argparse import Namespace

import pytest

from flexfloor.integrations.slime_settings import SlimeSettings


def test_defaults_and_slimes_own_admin_key() -> None:
    assert SlimeSettings.from_args(Namespace(rollout_batch_size=4)) == SlimeSettings()
    assert SlimeSettings.from_args(Namespace(sglang_admin_api_key="k")).admin_key == "k"
    own = Namespace(sglang_admin_api_key="k", flexfloor_admin_key="mine")
    assert SlimeSettings.from_args(own).admin_key == "mine"


def test_values_are_taken_over() -> None:
    args = Namespace(flexfloor_engine_urls=["http://a:1"], flexfloor_history="h", flexfloor_folder=None)
    settings = SlimeSettings.from_args(args)
    assert settings.engine_urls == ("http://a:1",)
    assert settings.history == "h"
    assert settings.folder is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"flexfloor_max_resubmit": 3}, "flexfloor_max_resubmit: no such key"),
        ({"flexfloor_max_resubmits": -1}, "flexfloor_max_resubmits=-1"),
        ({"flexfloor_rejoin_timeout_s": 0}, "flexfloor_rejoin_timeout_s=0"),
    ],
)
def test_what_cannot_be_is_named(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SlimeSettings.from_args(Namespace(**values))
