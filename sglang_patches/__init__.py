"""SGLang plugin of FlexFloor: hooks on SGLang, listed as data in `catalog.py`.

Installing this package makes SGLang call `register()` in every process of every server of the environment.
Therefore this module imports nothing else of ours, and `register()` returns at once unless `flexfloor-serve`
started the server.
"""

import os

CONFIG_ENV = "FLEXFLOOR_PLUGIN_CONFIG"
"""Path of the JSON file with the plugin's configuration. Unset: the plugin does nothing at all."""


def register() -> None:
    """Entry point `sglang.srt.plugins`: install the hooks of the catalog, or do nothing.

    Raises SystemExit with the reason when the hooks cannot be installed exactly as they were checked: SGLang
    swallows any other exception of a plugin and would serve unpatched.
    """
    config_path = os.environ.get(CONFIG_ENV)
    if not config_path:
        return
    from sglang_patches.plugin import enable

    enable(config_path)
