"""Secrets in configurations, errors and log lines."""

from pathlib import Path

import pytest

from flexfloor.errors import ConfigError
from flexfloor.masking import is_secret, masked, masked_text
from flexfloor.report import metrics


@pytest.mark.parametrize(
    "name",
    ["api_key", "api-key", "--admin-api-key", "rollout.server_args.admin-api-key", "wandb_api_key", "token",
     "hf_token", "client_secret", "password", "Authorization", "aws-secret", "server_args./x.api_key"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["max_response_tokens", "tokens", "token_level", "eos_token_id", "api_keys_path", "trainer_keys", "key",
     "context_tokens", "seed", "skip-tokenizer-init", "kv_bytes_per_token"],
)  # fmt: skip
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_values_are_replaced_and_nothing_else() -> None:
    config = {
        "rollout": {"server_args": {"admin-api-key": "k1", "mem": 3}, "max_response_tokens": 64},
        "list": [{"token": "t"}, {"password": None, "api_key": 12}],
        "url": "http://me:pw@host:1/x",
    }
    assert masked(config) == {
        "rollout": {"server_args": {"admin-api-key": "***", "mem": 3}, "max_response_tokens": 64},
        "list": [{"token": "***"}, {"password": None, "api_key": "***"}],
        "url": "http://***@host:1/x",
    }
    assert config["list"] == [{"token": "t"}, {"password": None, "api_key": 12}]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ServerArgs(api_key='k 1', port=3)", "ServerArgs(api_key=***, port=3)"),
        ("{'admin_api_key': 'k1', 'api_key': None}", "{'admin_api_key': ***, 'api_key': None}"),
        ("serve --api-key k1 --admin-api-key=k2 x", "serve --api-key *** --admin-api-key=*** x"),
        ("rollout.server_args.api-key=k1", "rollout.server_args.api-key=***"),
        ("max_response_tokens=64 eos_token_id=2", "max_response_tokens=64 eos_token_id=2"),
        ("  token: abc\n", "  token: ***\n"),
    ],
)  # fmt: skip
def test_texts(text: str, shown: str) -> None:
    assert masked_text(text) == shown


def test_a_refused_configuration_shows_no_key() -> None:
    error = ConfigError("rollout.server_args.api-key", "k1", "every run sets it", "remove it")
    assert "k1" not in str(error)
    assert "rollout.server_args.api-key='***'" in str(error)


def test_weights_and_biases_gets_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder:
        def init(self, **given: object) -> None:
            self.given = given

    recorder = Recorder()
    monkeypatch.setattr(metrics.importlib, "import_module", lambda _name: recorder)
    metrics.WandbSink("project", tmp_path, {"rollout": {"server_args": {"api_key": "k1"}}})
    assert recorder.given["config"] == {"rollout": {"server_args": {"api_key": "***"}}}
