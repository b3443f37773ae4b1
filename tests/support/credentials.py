"""Made-up credentials of many providers, joined at run time so that no file contains one, and strings like them."""

import base64
import json
import random
import string

ALPHANUMERIC = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
UPPER = string.ascii_uppercase + string.digits
URL_SAFE = ALPHANUMERIC + "-_"
BASE64 = ALPHANUMERIC + "+/"
_random = random.Random(7)


def _chars(count: int, alphabet: str = ALPHANUMERIC) -> str:
    return "".join(_random.choice(alphabet) for _ in range(count))


def _base64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _pem(kind: str) -> str:
    return f"-----BEGIN {kind}" + "PRIVATE KEY-----"


def credentials() -> dict[str, tuple[str, str]]:
    """By provider: a text that contains a credential, and the part of it that must never be repeated."""
    return {name: (before + secret + after, secret) for name, secret, before, after in _rows()}


def _row(name: str, secret: str, before: str = "", after: str = "") -> tuple[str, str, str, str]:
    return name, secret, before, after


def _rows() -> tuple[tuple[str, str, str, str], ...]:
    jwt = ".".join((_base64('{"alg":"HS256","typ":"JWT"}'), _base64('{"sub":"1234567890"}'), _chars(43, URL_SAFE)))
    hook = "https://hooks.slack.com/services/" + "T"
    return (
        _row("Hugging Face", "hf" + "_" + _chars(34, string.ascii_letters)),
        _row("AWS access key", "AK" + "IA" + _chars(16, UPPER)),
        _row("AWS secret key", _chars(38, BASE64) + "1a", "AWS_SECRET_ACCESS_KEY="),
        _row("AWS credentials file", _chars(38, BASE64) + "1a", "aws_secret_access_key = "),
        _row("AWS JSON", _chars(38, BASE64) + "1a", '{"SecretAccessKey": "', '"}'),
        _row("Google API key", "AI" + "zaSy" + _chars(33, URL_SAFE)),
        _row("Google OAuth client", "GOC" + "SPX-" + _chars(28)),
        _row("Google service account", _pem(""), '{"type": "service_account", "private_key": "', '\\nMII"}'),
        _row("GitHub", "gh" + "p_" + _chars(36)),
        _row("GitHub, fine-grained", "github" + "_pat_" + _chars(22) + "_" + _chars(59)),
        _row("GitLab", "gl" + "pat-" + _chars(20)),
        _row("NVIDIA NGC", "nv" + "api-" + _chars(64, URL_SAFE)),
        _row("Docker Hub", "dckr" + "_pat_" + _chars(27)),
        _row(
            "Docker config",
            base64.b64encode(f"me:{_chars(20)}".encode()).decode(),
            '{"auths": {"r": {"auth": "',
            '"}}}',
        ),
        _row("npm", "np" + "m_" + _chars(36)),
        _row("PyPI", "py" + "pi-AgEIcHlwaS5vcmc" + _chars(140, URL_SAFE)),
        _row("Stripe", "sk" + "_live_" + _chars(24)),
        _row("Vault", "hv" + "s." + _chars(95, URL_SAFE)),
        _row("Databricks", "da" + "pi" + _chars(32, HEX)),
        _row("Slack bot", "-".join(("xox" + "b", _chars(12, string.digits), _chars(12, string.digits), _chars(24)))),
        _row("Slack hook", hook + _chars(8, UPPER) + "/B" + _chars(10, UPPER) + "/" + _chars(24)),
        _row("OpenAI", "sk" + "-proj-" + _chars(74, URL_SAFE) + "T3Blbk" + "FJ" + _chars(74, URL_SAFE)),
        _row("Anthropic", "sk" + "-ant-api03-" + _chars(93, URL_SAFE) + "AA"),
        _row("Weights & Biases", _chars(40, HEX), "WANDB_API_KEY="),
        _row("Weights & Biases, new", "wandb" + "_v1_" + _chars(77)),
        _row("JSON web token", jwt),
        _row("kubeconfig", jwt, "users:\n- name: me\n  user:\n    token: "),
        _row("SSH key", _pem("OPENSSH ")),
        _row("RSA key", _pem("RSA ")),
        _row("Redis URL", "pw" + _chars(12), "redis://:", "@cache:6379"),
        _row("PostgreSQL URL", "pw" + _chars(12), "postgresql://me:", "@db/x"),
        _row("MongoDB URL", "pw" + _chars(12), "mongodb+srv://me:", "@cluster.example.net/x"),
        _row("HTTPS URL", "pw" + _chars(12), "https://user:", "@host.example.org/m"),
        _row("S3 URL", "pw" + _chars(30), f"s3://{_chars(16)}:", "@bucket/x"),
        _row("Azure shared access", _chars(43), "https://me.blob.core.windows.net/c/x?sv=2024-11-04&sig=", "%3D"),
        _row("Azure account", _chars(86, BASE64), "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=", "=="),
        _row("S3 signed URL", _chars(64, HEX), "https://b.s3.amazonaws.com/x?X-Amz-Expires=60&X-Amz-Signature="),
        _row("GCS signed URL", _chars(128, HEX), "https://storage.googleapis.com/b/x?X-Goog-Signature="),
        _row("URL with a token", _chars(24) + "1a", "https://host.example.org/x?access_token="),
        _row("password in YAML", "pw" + _chars(12), "password: "),
        _row("PostgreSQL variable", "pw" + _chars(12), "PGPASSWORD="),
        _row("database variable", "pw" + _chars(12), "DB_PASS="),
        _row(
            "database setting",
            "pw" + _chars(12).lower().translate(str.maketrans("0123456789", "abcdefghij")),
            "db_pass: ",
        ),
        _row("setting of a mailer", "letmein", "userPass="),
        _row("mailer in TOML", "correct-horse", 'pass = "', '"'),
        _row("mailer in JSON", "correct-horse", '{"smtp-pass": "', '"}'),
        _row("mailer in an environment", "correcthorse", "smtp-pass="),
        _row("joined variable", _chars(18) + "123a", "HFTOKEN="),
        _row("GitLab variable", _chars(18) + "123a", "GITLAB_PAT="),
        _row("MLflow variable", "pw" + _chars(12), "MLFLOW_TRACKING_PASSWORD="),
        _row("Comet", _chars(25) + "123a", "COMET_API_KEY="),
        _row("Cohere", _chars(40), "COHERE_API_KEY="),
        _row("Replicate", "r" + "8_" + _chars(37)),
        _row("Groq", "gs" + "k_" + _chars(52)),
        _row("SendGrid", "S" + "G." + _chars(22) + "." + _chars(43)),
        _row("Twilio", "S" + "K" + _chars(32, HEX)),
        _row("DigitalOcean", "dop" + "_v1_" + _chars(64, HEX)),
        _row("Terraform", _chars(14) + ".atla" + "sv1." + _chars(67)),
        _row("Neptune", _base64(json.dumps({"api_key": _chars(36)})) + "1", "NEPTUNE_API_TOKEN="),
        _row("basic authentication", _base64(f"me:{_chars(20)}"), "Authorization: Basic "),
        _row("bearer token", _chars(40), "Authorization: Bearer "),
    )


COMMIT = "0123456789abcdef0123456789abcdef01234567"
UUID = "3f2b8c1e-9d4a-4c6b-8e7f-0a1b2c3d4e5f"
# Strings that a search for secrets may take for one.
HARMLESS = (
    "Second pass: smaller rate",
    "PASS: everything is fine",
    "# Second pass: greedy",
    "forward pass: bfloat16",
    "two-pass: disabled",
    "runs/first-pass: expected a new or empty folder",
    "runs/first-password: expected a new or empty folder",
    f"GIT_COMMIT={COMMIT}",
    f"GIT_SHA={COMMIT}",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
    "RAY_ENABLE_K8S_TOKEN_AUTH=true",
    "TOKENIZERS_PARALLELISM=false",
    "HF_TOKEN=",
    "HF_TOKEN=$TOKEN",
    "REDIS_URL=redis://:$(REDIS_PASSWORD)@redis:6379",
    "GOOGLE_APPLICATION_CREDENTIALS=/var/run/secrets/gcp/key.json",
    "AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/secrets/token",
    "RAY_AUTH_TOKEN_PATH=/etc/ray/auth_token",
    "SECRET_NAME=hugging-face-2026-production",
    "AWS_ENDPOINT_URL=http://minio:9000",
    "NCCL_DEBUG=INFO",
    f"checksum/config: {COMMIT}{COMMIT[:24]}",
    f"registry.example.org/pos2distill@sha256:{COMMIT}{COMMIT[:24]}",
    f"registry.example.org:5000/pos2distill:{COMMIT}",
    f"{COMMIT}{COMMIT[:24]}  model.safetensors",
    f'{{"etag": "{COMMIT[:32]}"}}',
    f"model.revision={COMMIT}",
    f"/mnt/models--org--m/snapshots/{COMMIT}/config.json",
    f"id: {UUID}",
    f'{{"key": "{UUID}", "value": "{UUID}"}}',
    f"token: {UUID}",
    "data.path=s3://my-bucket/nq-open-20_total_documents_gold_at_0.jsonl.gz",
    "https://storage.googleapis.com/my-bucket/nq.jsonl.gz",
    "https://example.org/@user/page:1",
    "http://127.0.0.1:8265",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct-1M",
    "nvcr.io/nvidia/pytorch:25.10-py3",
    "eks.amazonaws.com/role-arn: arn:aws:iam::123456789012:role/pos2distill",
    "iam.gke.io/gcp-service-account: pos2distill@my-project.iam.gserviceaccount.com",
    "secretKeyRef: {name: hugging-face, key: token}",
    "pad_token: <|endoftext|>",
    '"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"',
    '"tokenizer_class": "PreTrainedTokenizerFast"',
    "sampling.max_tokens=256",
    "runtime.trainers.micro_batch_tokens=16384",
    "primary_key: example_id_2026",
    "method.weights: kl+align",
    '"forward_pass": 0.8594239980158579',
    '"Password": 105243, "password": 3605',
    "fingerprint: 0123456789abcdef",
    "kubectl.kubernetes.io/restartedAt: 2026-11-23T06:00:00Z",
)
