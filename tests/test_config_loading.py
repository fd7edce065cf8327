"""`load_config` and `parse_config`: values, overrides, error shape, secrets, round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebft_core.config import load_config, parse_config
from ebft_core.config.loading import config_advice, dump_yaml, redacted_dump
from ebft_core.errors import UserError, UserErrors

MINIMAL = "model: {name_or_path: some/model}\ndata:\n  sources:\n  - path: a.txt\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def minimal(**sections: Any) -> dict[str, Any]:
    return {"model": {"name_or_path": "some/model"}, "data": {"sources": [{"path": "a.txt"}]}} | sections


def errors_of(make: Any) -> list[UserError]:
    with pytest.raises(UserErrors) as caught:
        make()
    return caught.value.errors


def only_error(make: Any) -> UserError:
    (error,) = errors_of(make)
    return error


class TestValues:
    def test_the_documented_defaults(self, tmp_path: Path) -> None:
        ebft = load_config(write(tmp_path, MINIMAL)).ebft
        assert ebft.model_dump(exclude={"whiten_tol", "feature_device", "max_dropped_fraction"}) == {
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_completion_length": 256,
            "adaptive_max_tokens": True,
            "gt_length_multiplier": 1.5,
            "mask_truncated_completions": False,
            "scale_rewards": "none",
            "mode": "strided",
            "stride": 8,
            "context_length": 8,
            "generate_max_len": 8,
            "n_samples_per_prompt": 4,
            "temperature": 0.6,
            "top_p": 1.0,
            "feature_layers": [0.25, 0.5, 0.75],
            "embed_method": "last_token",
            "whitening": "feature",
            "alignment_coef": 1.0,
            "diversity_coef": 1.0,
            "rl_coef": 1.0,
            "ce_coef": 0.0,
            "kl_coef": 0.0,
            "kl_estimator": "k3",
            "ema_decay": 0.0,
            "advantage_estimator": "rloo",
            "min_completion_prefix": 0,
            "document_masking": True,
        }

    def test_exponents_without_a_point_are_numbers(self, tmp_path: Path) -> None:
        config = load_config(write(tmp_path, MINIMAL + "trainer: {learning_rate: 1e-5}\n"))
        assert config.trainer.learning_rate == 1e-5

    def test_an_integer_is_a_number(self) -> None:
        config = parse_config(minimal(ebft={"temperature": 1}))
        assert type(config.ebft.temperature) is float

    @pytest.mark.parametrize("written", ["none", "None", "null", "~"])
    def test_lora_none_trains_every_weight(self, tmp_path: Path, written: str) -> None:
        assert load_config(write(tmp_path, MINIMAL + f"lora: {written}\n")).lora is None
        assert load_config(write(tmp_path, MINIMAL), [f"lora={written}"]).lora is None

    def test_a_byte_order_mark_is_no_part_of_the_first_key(self, tmp_path: Path) -> None:
        file = tmp_path / "bom.yaml"
        file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
        assert load_config(file).model.name_or_path == "some/model"

    @pytest.mark.parametrize(
        ("section", "key", "value", "expected"),
        [
            ("ebft", "stride", "8", "integer ≥ 1"),
            ("ebft", "stride", True, "integer ≥ 1"),
            ("ebft", "stride", 8.0, "integer ≥ 1"),
            ("ebft", "stride", 0, "integer ≥ 1"),
            ("ebft", "stride", None, "integer ≥ 1"),
            ("ebft", "temperature", 0, "number > 0"),
            ("ebft", "temperature", True, "number > 0"),
            ("ebft", "temperature", "0.6", "number > 0"),
            ("ebft", "alignment_coef", float("nan"), "number ≥ 0"),
            ("ebft", "alignment_coef", float("inf"), "number ≥ 0"),
            ("ebft", "top_p", 1.5, "number > 0 and ≤ 1"),
            ("ebft", "document_masking", 1, "true or false"),
            ("ebft", "document_masking", "yes", "true or false"),
            ("ebft", "feature_layers", [], "non-empty list of number > 0 and ≤ 1"),
            ("ebft", "feature_layers", 0.5, "non-empty list of number > 0 and ≤ 1"),
            ("ebft", "advantage_estimator", "RLOO", "one of: rloo, group_norm, reinforce"),
            ("trainer", "max_steps", 2.5, "integer ≥ 1 or null"),
            ("trainer", "seed", -1, "integer ≥ 0 and < 4.29497e+09"),
            ("lora", "target_modules", 3, "text or list of text"),
            ("lora", "dropout", 1.0, "number ≥ 0 and < 1"),
        ],
    )
    def test_wrong_values(self, section: str, key: str, value: object, expected: str) -> None:
        error = only_error(lambda: parse_config(minimal(**{section: {key: value}})))
        assert error.where == f"{section}.{key}"
        assert error.value == ("null" if value is None else value) or value != value
        assert error.expected == expected

    def test_an_item_of_a_list_has_its_index(self) -> None:
        error = only_error(lambda: parse_config(minimal(ebft={"feature_layers": [0.5, 1.5]})))
        assert (error.where, error.value) == ("ebft.feature_layers[1]", 1.5)

    @pytest.mark.parametrize(
        ("changes", "hint"),
        [
            ({"ebft": {"stride": "8"}}, "without quotes"),
            ({"ebft": {"advantage_estimator": "rlo"}}, "did you mean `rloo`?"),
            ({"ebft": {"whitening": True}}, "`feature`"),
            ({"trainer": None}, "remove the line"),
            ({"trainer": {"lr_scheduler": "constant_with_warmup"}}, "`constant`"),
            ({"trainer": {"max_steps": 8.0}}, "write 8"),
            ({"data": {"sources": ["a.txt"]}}, "write `- path: a.txt`"),
            ({"data": {"sources": "a.txt"}}, "write a list"),
        ],
    )
    def test_hints(self, changes: dict[str, Any], hint: str) -> None:
        assert hint in str(only_error(lambda: parse_config(minimal(**changes))).hint)


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("changes", "where", "suggestion"),
        [
            ({"ebtf": {}}, "ebtf", "`ebft`"),
            ({"ebft": {"strid": 4}}, "ebft.strid", "`stride`"),
            ({"ebft": {"Stride": 4}}, "ebft.Stride", "`stride`"),
            ({"trainer": {"stride": 4}}, "trainer.stride", "`ebft.stride`"),
            ({"micro_batch_size": 2}, "micro_batch_size", "`trainer.micro_batch_size`"),
            ({"learning_rates": 2}, "learning_rates", "`trainer.learning_rate`"),
            ({"data": {"sources": [{"path": "a", "formt": "csv"}]}}, "data.sources[0].formt", "`format`"),
        ],
    )
    def test_did_you_mean(self, changes: dict[str, Any], where: str, suggestion: str) -> None:
        error = only_error(lambda: parse_config(minimal(**changes)))
        assert error.where == where
        assert suggestion in str(error.hint)

    def test_a_name_like_no_other_lists_the_keys(self) -> None:
        error = only_error(lambda: parse_config(minimal(tracking={"qqqq": 1})))
        assert error.expected == "one of: mlflow_uri, experiment, artifact_location, tags"
        assert error.hint is None

    def test_a_key_of_the_server_that_does_not_exist(self) -> None:
        error = only_error(lambda: parse_config(minimal(vllm={"port": 8000})))
        assert error.where == "vllm.port"


class TestFiles:
    def test_every_mistake_is_reported_at_once_with_its_line(self, tmp_path: Path) -> None:
        text = MINIMAL + (
            "ebft:\n  stride: 0\n  use_whitening: true\n  feature_layers: [0.5, 1.5]\n"
            "trainer:\n  batch_size: 3\n  micro_batch_size: 2\n  max_stepz: 3\n"
            "sedd: 1\n"
        )
        file = write(tmp_path, text)
        places = {str(error.where) for error in errors_of(lambda: load_config(file))}
        assert places == {
            f"ebft.stride ({file}:6)",
            f"ebft.use_whitening ({file}:7)",
            f"ebft.feature_layers[1] ({file}:8)",
            f"trainer.batch_size ({file}:10)",  # a rule that relates two keys
            f"trainer.max_stepz ({file}:12)",
            f"sedd ({file}:13)",
        }

    def test_a_rule_is_silent_about_a_key_that_is_wrong_already(self) -> None:
        changes = minimal(ebft={"context_length": "x", "generate_max_len": 1020})
        assert [error.where for error in errors_of(lambda: parse_config(changes))] == ["ebft.context_length"]

    def test_missing_sections(self, tmp_path: Path) -> None:
        errors = errors_of(lambda: load_config(write(tmp_path, "name: x\n")))
        assert [error.what for error in errors] == ["`model` is required", "`data` is required"]
        assert all("for example" in str(error.hint) for error in errors)

    @pytest.mark.parametrize(
        ("name", "content", "what"),
        [
            ("missing.yaml", None, "no such file"),
            ("latin.yaml", b"name: caf\xe9\n", "not UTF-8"),
            ("twice.yaml", b"name: a\nname: b\n", "stands twice"),
            ("empty.yaml", b"", "empty"),
        ],
    )
    def test_files_that_cannot_be_read(
        self, tmp_path: Path, name: str, content: bytes | None, what: str
    ) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        error = only_error(lambda: load_config(tmp_path / name))
        assert what in error.what
        assert name in str(error.where)

    def test_a_folder_is_not_a_file(self, tmp_path: Path) -> None:
        assert only_error(lambda: load_config(tmp_path)).what == "this is a folder"

    def test_a_misspelt_file_gets_a_suggestion(self, tmp_path: Path) -> None:
        write(tmp_path, MINIMAL, "quickstart.yaml")
        assert "quickstart.yaml" in str(only_error(lambda: load_config(tmp_path / "quickstrat.yaml")).hint)


class TestOverrides:
    def test_values_are_yaml(self, tmp_path: Path) -> None:
        overrides = [
            "ebft.stride=4",
            "trainer.learning_rate=3e-4",
            "ebft.feature_layers=[0.5, 1]",
            "data.sources.0.path=b=c.txt",
            "data.sources[0].split=test",
            "tracking.tags={team: a}",
            "name='8'",
            "model.revision=",
        ]
        config = load_config(write(tmp_path, MINIMAL), overrides)
        assert config.ebft.stride == 4
        assert config.trainer.learning_rate == 3e-4
        assert config.ebft.feature_layers == [0.5, 1.0]
        assert (config.data.sources[0].path, config.data.sources[0].split) == ("b=c.txt", "test")
        assert config.tracking.tags == {"team": "a"}
        assert config.name == "8"
        assert config.model.revision is None

    def test_the_last_one_wins(self, tmp_path: Path) -> None:
        assert load_config(write(tmp_path, MINIMAL), ["ebft.stride=4", "ebft.stride=2"]).ebft.stride == 2

    def test_an_item_of_a_list_in_the_file(self, tmp_path: Path) -> None:
        file = write(tmp_path, MINIMAL + "ebft: {feature_layers: [0.2, 0.4]}\n")
        assert load_config(file, ["ebft.feature_layers.1=1.0"]).ebft.feature_layers == [0.2, 1.0]

    @pytest.mark.parametrize("written", ["null", "none"])
    def test_a_key_below_a_section_that_is_off_switches_it_on(self, tmp_path: Path, written: str) -> None:
        config = load_config(write(tmp_path, MINIMAL + f"lora: {written}\n"), ["lora.r=4"])
        assert config.lora is not None
        assert config.lora.r == 4

    @pytest.mark.parametrize(
        ("override", "where", "what"),
        [
            ("ebft.strid=4", "ebft.strid (--set)", "unknown key `strid`"),
            ("nothing.here=4", "nothing (--set)", "unknown key `nothing`"),
            ("ebft.stride", "--set", "not of the form"),
            ("ebft..stride=4", "--set", "not of the form"),
            ("=4", "--set", "not of the form"),
            ("ebft.stride=[1", "--set ebft.stride:1", "not valid YAML"),
            ("data.sources.0.path=*.py", "--set data.sources.0.path:1", "not valid YAML"),
            ("ebft.stride=0", "ebft.stride (--set)", "out of range"),
            ("ebft.stride='4'", "ebft.stride (--set)", "wrong type"),
            ("ebft={stride: 0}", "ebft.stride (--set)", "out of range"),
            ("data.sources.1.path=x", "--set data.sources.1.path", "no such item"),
            ("data.sources.first.path=x", "--set data.sources.first.path", "no such item"),
            ("ebft.feature_layers.0=0.5", "--set ebft.feature_layers.0", "not a list in the file"),
            ("model.name_or_path.x=1", "--set model.name_or_path.x", "a value, not a section"),
        ],
    )
    def test_bad_overrides(self, tmp_path: Path, override: str, where: str, what: str) -> None:
        error = only_error(lambda: load_config(write(tmp_path, MINIMAL), [override]))
        assert error.where == where
        assert what in error.what

    def test_the_file_is_not_blamed_for_an_override(self, tmp_path: Path) -> None:
        file = write(tmp_path, MINIMAL + "ebft:\n  stride: 4\n")
        assert only_error(lambda: load_config(file, ["ebft.stride=-1"])).where == "ebft.stride (--set)"


class TestSecrets:
    SECRETS = ("hunter2", "s3cr3t")

    @pytest.mark.parametrize(
        "changes",
        [
            {"tracking": {"mlflow_uri": "file://user:hunter2@host/x"}},
            {"tracking": {"mlflow_uri": "mysql://user:hunter2@host/x?token=s3cr3t", "experimint": 1}},
            {"tracking": {"mlflow_uri": ["http://user:hunter2@host"]}},
            {"tracking": {"password": "hunter2"}},
            {"tracking": {"tags": {"api_key": ["hunter2"]}}},
            {"wandb_api_key": "hunter2"},
            {"hf_token": {"value": "hunter2"}},
            {"extra": {"deep": [{"AWS_SECRET_ACCESS_KEY": "hunter2"}]}},
            {"workspace": "s3://key:hunter2@bucket?secret=s3cr3t"},
        ],
    )
    def test_errors_do_not_show_them(self, changes: dict[str, Any]) -> None:
        for error in errors_of(lambda: parse_config(minimal(**changes))):
            assert not any(secret in error.render() for secret in self.SECRETS)
            assert not any(secret in str(error.to_json()) for secret in self.SECRETS)

    @pytest.mark.parametrize(
        "override", ["tracking.password=hunter2", "password=[hunter2", "tracking.token.=hunter2"]
    )
    def test_errors_of_overrides_do_not_show_them(self, tmp_path: Path, override: str) -> None:
        error = only_error(lambda: load_config(write(tmp_path, MINIMAL), [override]))
        assert "hunter2" not in error.render()

    def test_dumps_do_not_show_them_and_keep_the_rest(self) -> None:
        tags = {"token": "hunter2", "team": "tokenizers", "link": "https://x/?access_token=s3cr3t&a=1"}
        uri = "postgresql://mlflow:hunter2@db:5432/runs"
        config = parse_config(minimal(tracking={"mlflow_uri": uri, "tags": tags}))
        assert redacted_dump(config)["tracking"] == {
            "mlflow_uri": "postgresql://mlflow:***@db:5432/runs",
            "experiment": "ebft",
            "artifact_location": None,
            "tags": {"token": "***", "team": "tokenizers", "link": "https://x/?access_token=***&a=1"},
        }
        assert not any(secret in dump_yaml(config) for secret in self.SECRETS)
        assert config.tracking.mlflow_uri == uri

    @pytest.mark.parametrize(
        "text",
        [
            "meta-llama/Llama-3.2-1B",
            "last_token",
            "https://host:8080/a@b",
            "sqlite:///x.db",
            "stdlib:**/*.py",
            "a:b@c",
        ],
    )
    def test_ordinary_values_stay(self, text: str) -> None:
        config = parse_config(minimal(tracking={"experiment": text}))
        assert redacted_dump(config)["tracking"]["experiment"] == text


class TestAdvice:
    @pytest.mark.parametrize(
        ("ebft", "key"),
        [
            (
                {"n_samples_per_prompt": 1, "advantage_estimator": "reinforce", "diversity_coef": 0},
                "ebft.whitening",
            ),
            ({"n_samples_per_prompt": 2}, "ebft.n_samples_per_prompt"),
            ({"advantage_estimator": "reinforce"}, "ebft.advantage_estimator"),
        ],
    )
    def test_allowed_but_probably_not_meant(self, ebft: dict[str, Any], key: str) -> None:
        (advice,) = config_advice(parse_config(minimal(ebft=ebft)))
        assert advice.startswith(f"{key}: ")

    def test_the_defaults_need_none(self) -> None:
        assert config_advice(parse_config(minimal())) == []
