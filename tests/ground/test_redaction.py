"""Redaction: no secret stays in any of its shapes, and nothing else is taken for one."""

import json
import re
import shlex
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.ground.redaction import REDACTED, redact, redact_variable, redact_words

# Alphabets that occur in no other part of the texts; a password of one's own has any character.
WORD = st.text("QJXZ0123456789", min_size=16, max_size=40).filter(lambda text: text[0] > "9")
ANY = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=6).map(
    lambda text: f"Q{text}Z"
)

OPTIONS = (
    *("--token", "--password", "--api-key", "--api_key", "--apikey", "--hf-token", "--secret"),
    *("--client-secret", "--auth-token", "--wandb_api_key", "--credentials", "--key", "-token"),
    *("--db.password", "--accessToken", "--private-key", "--passphrase", "--github-token"),
)
VARIABLES = (
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PGPASSWORD"),
    *(
        "AWS_ACCESS_KEY_ID",
        "MYSQL_PWD",
        "DB_PASSWORD",
        "SMTP_PASS",
        "MY_SECRET_1",
        "GITHUB_PAT",
    ),
    *("GOOGLE_CREDENTIALS", "NCCL_MY_KEY", "STEPMARK_KEY", "NPM_CONFIG__AUTH", "A_SECRET_B"),
    *("OPENAI_API_KEY", "TOKEN", "REDIS_PASSWORD_2", "JWT", "SSHPASS"),
)


@given(secret=ANY, name=st.sampled_from(OPTIONS))
def test_no_option_tells_its_secret(secret: str, name: str) -> None:
    assert redact_words(["run", name, secret, "--lr", "1"]) == (
        *("run", name, REDACTED),
        *("--lr", "1"),
    )
    assert redact_words([f"{name}={secret}", "x"]) == (f"{name}={REDACTED}", "x")


@given(
    secret=ANY, name=st.sampled_from(VARIABLES), before=st.sampled_from(["", "--env=", "-e"])
)
def test_no_variable_tells_its_secret(secret: str, name: str, before: str) -> None:
    assert redact_variable(name, secret) == REDACTED
    assert redact_words(["env", f"{before}{name}={secret}"])[1] == f"{before}{name}={REDACTED}"


@given(secret=ANY, name=st.sampled_from(OPTIONS))
def test_no_command_in_a_text_tells_its_secret(secret: str, name: str) -> None:
    # Line breaks end what a line of a log can tell.
    secret = re.sub(r"\s", " ", secret)
    words = shlex.split(redact(f"failed: {shlex.join(['go', name, secret, '--lr', '1'])}"))
    assert words == ["failed:", "go", name, REDACTED, "--lr", "1"]


SHAPES = (
    "Authorization: Bearer {}",
    "curl -H 'Authorization: token {}' https://host",
    '{{"Authorization": "Basic {}"}}',
    "Proxy-Authorization: {}",
    "Cookie: session={}",
    "X-Api-Key: {}",
    "x-auth-token: {}",
    "Bearer {}",
    "https://host/file?sig={}&se=2026",
    "https://host/file?se=2026&X-Amz-Signature={}#end",
    "https://host/file?X-Amz-Credential={}",
    "https://host/file?key={}",
    "https://host/file?Signature={}&Expires=1",
    "https://host/file?a=1&token={}",
    "https://me:{}@host:80/path",
    "redis://:{}@host",
    "https://{}@host/path",
    "export HF_TOKEN={}; python train.py",
    "Namespace(lr=0.1, api_key='{}', n=1)",
    '{{"access_token":"{}","n":1}}',
    "token={}",
    "token='{}'",
    "password: {}",
    "wandb_api_key: {}",
    "DefaultEndpointsProtocol=https;AccountKey={}==;EndpointSuffix=net",
    "--token {}",
    "python a.py --password={} --lr 1",
    "hf_{}",
    "key sk-proj-{}0123",
    "ghp_{}",
    "github_pat_{}",
    "xoxb-{}",
    "glpat-{}",
    "nvapi-{}",
    "eyJhbGciOi.eyJ{}.c2ln",
)


@pytest.mark.parametrize("shape", SHAPES)
@given(secret=WORD)
def test_no_shape_tells_its_secret(shape: str, secret: str) -> None:
    text = f"2026-11-28 step 3: {shape.format(secret)}"
    for each in (
        redact(text),
        *redact_words([shape.format(secret)]),
        redact_variable("A", text),
    ):
        assert secret not in each
        assert REDACTED in each
    assert redact(redact(text)) == redact(text)


def test_our_own_sentence_on_an_option_stays() -> None:
    text = "--token is invalid: it must be one of the options of this command."
    assert redact(text) == text
    assert redact("--token isolated") == f"--token {REDACTED}"


def test_issuers_and_basic_logins() -> None:
    assert redact("id AKIAIOSFODNN7EXAMPLE here") == f"id {REDACTED} here"
    assert redact("Basic dXNlcjpwYXNzd29yZA==") == f"Basic {REDACTED}"


@pytest.mark.parametrize(
    "text",
    [
        "--key-value-heads 8 --num-key-value-heads=8 num_key_value_heads: 8",
        "--tokens 4096 tokens=4096 --num-tokens 7 tokens/s: 123 max_tokens=5",
        "--pad-token <pad> --eos_token </s> --loss-per-token 3 eos_token_id=2 --max-token 5",
        "--prompt-key prompt --image_key image sort_key=x --json-keys text",
        "NCCL_ALGO=Ring NCCL_IB_PKEY=3 NCCL_DEBUG=INFO NCCL_IB_HCA=mlx5_0,mlx5_1",
        "PYTHONHASHSEED=0 PWD=/root OLDPWD=/x KEYBOARD=us MONKEY=3 monkey=4 SSH_AUTH_SOCK=/a",
        "AWS_REGION=eu TOKENIZERS_PARALLELISM=false TORCH_NCCL_BYPASS=1 KEY_FILE=/a",
        "op gemm --pass fwd --m 64 --bypass 1",
        "commit 1884dde51c0b1ee0aa92b3f0c7f2d51884dde512 sha256 " + "ab12" * 16,
        "meta-llama/Llama-3.1-8B deepseek-ai/DeepSeek-V3 llama-3.1-8b hf_model hf_config.json",
        "http://host:80/path?a=1&b=2 https://host/a@b git+https://h/r.git",
        "Basic attention overlaps; basic blocks; Basic Information",
        "risk-adjusted-momentum-2026-11-28-00 disk-0123456789012345678901234",
        "author: me  authority=x  design=3 signal: 9 sig=11 significant=1",
        "signature=(1, 2) by_key: dict[str, int] groups.group.key: 1 cub::by_key::Kernel<int>",
        "if token == x and token != y",
        "bypass=1 compass: north passes=3 --passes 3 pass: bwd",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text
    assert redact_words(text.split()) == tuple(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "sorted(rows, key=len)  key: 5  KeyError: 'model'  unexpected token: <",
        "a key is missing: give it  the token is invalid  secret: it",
    ],
)
def test_prose_and_code_stay(text: str) -> None:
    assert redact(text) == text


def test_an_option_without_a_value_hides_no_other_option() -> None:
    words = ("--token", "--lr", "1", "--use-auth-token", "--bf16")
    assert redact_words(words) == words


def test_the_rest_of_a_text_stays() -> None:
    text = 'a {"n": 1, "token": "x\\"y", "m": 2} --password \'p q\' b token=z c'
    shown = f'a {{"n": 1, "token": "{REDACTED}", "m": 2}} --password \'{REDACTED}\' b '
    assert redact(text) == f"{shown}token={REDACTED} c"
    assert json.loads(redact('{"api_key": "abc", "n": [1]}')) == {"api_key": REDACTED, "n": [1]}


def test_a_secret_of_this_process_is_known_by_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "correct horse battery")
    monkeypatch.setenv("SHORT_KEY", "1")  # it stands in other texts by chance
    monkeypatch.setattr(
        sys, "argv", ["stepmark", "watch", "--", "job", "--password", "staple 9"]
    )
    assert redact("1 correct horse battery, staple 9") == f"1 {REDACTED}, {REDACTED}"
    (word,) = redact_words(["correct horse battery"])
    assert word == REDACTED


def test_an_error_does_not_quote_a_secret() -> None:
    # Its middle is left out, so that later nothing would tell what the rest is.
    error = ConfigError("argument", f"--token={'Q' * 100}", "a number")
    assert "Q" not in str(error)
    assert "--token=<redacted>" in str(error)


def test_a_process_does_not_quote_a_secret_of_its_command_line() -> None:
    words = ["-m", "stepmark", "watch", "--token", "Zq7-battery-staple", "--", "job"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Zq7" not in done.stdout + done.stderr


@pytest.mark.parametrize("text", ["a=" * 20_000, "'" * 40_000, "token=" * 10_000, "-" * 40_000])
def test_no_text_takes_long(text: str) -> None:
    started_s = time.process_time()
    redact(f"token {text}")
    assert time.process_time() - started_s < 2
