"""What a server with OpenAI's API says of itself before a run: whether it answers, takes the key and has the model."""

import os
import re
from collections.abc import Mapping
from typing import Any

import openai

from pos2distill.config import EndpointSection, ModelSection
from pos2distill.errors import UserError, did_you_mean
from pos2distill.sampling.engines.protocol import engine_error_text

# For each request of a check: a wrong address is reported within 20 s.
_CHECK_TIMEOUT_SECONDS = 8.0
# OpenRouter says "NAME is not a valid model ID", LiteLLM "Invalid model name passed in model=NAME", Mistral "Invalid
# model: NAME", DeepSeek "Model Not Exist".
_UNKNOWN_MODEL = re.compile(r"not a valid model|invalid model(:| name)|model (does )?not exist", re.IGNORECASE)


def read_api_key(settings: EndpointSection) -> str:
    """The key in the environment variable that the settings name.

    Raises:
        UserError: the settings name a variable that is not set.
    """
    if settings.api_key_env is None:
        # A private server often needs no key, but the client requires one.
        return os.environ.get("OPENAI_API_KEY") or "none"
    key = os.environ.get(settings.api_key_env)
    if not key:
        raise UserError(f"runtime.endpoint.api_key_env: the environment variable {settings.api_key_env} is not set")
    return key


def check_endpoint(model: ModelSection, settings: EndpointSection) -> None:
    """Ask the server for its models, so that a wrong address, key or name is an error before anything starts.

    A name that is not listed may be right: of OpenRouter's `MODEL:nitro`, Azure's deployments and LiteLLM's wildcards,
    only the model is listed, or nothing. Then the server must answer a request with this name. A server that lists no
    models is not checked.

    Raises:
        UserError: the check failed; names the setting.
    """
    try:
        served = _list_models(settings)
    except openai.APIConnectionError as error:
        reason = engine_error_text(error)
        raise UserError(f"{settings.base_url}: no server answers ({reason}) (runtime.endpoint.base_url)") from None
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        raise _refused_key(settings, error) from None
    except openai.InternalServerError:
        # Not yet an error: `transformers serve` 5.19 cannot list models on a machine without a cache of the hub's.
        _require_answer(model, settings, _no_model_or_api(model, settings))
        return
    except openai.NotFoundError:
        # Some servers list no models, but the address of most APIs ends in a version.
        if not str(settings.base_url).rstrip("/").endswith("/v1"):
            raise UserError(
                f"{settings.base_url}: has no list of models (HTTP 404); the address of the API often ends in /v1 "
                f"(runtime.endpoint.base_url)"
            ) from None
        return
    except openai.APIError:
        return
    name = name_at_server(model, settings)
    if served and _find(name, served) is None:
        _require_answer(model, settings, _unknown_model(model, settings, did_you_mean(name, list(served))))


def served_context(model: ModelSection, settings: EndpointSection) -> int | None:
    """The largest number of tokens of prompt and answer together, if the server reports it.

    vLLM and SGLang report it (`max_model_len`).
    """
    return context_length(served_model(model, settings))


def name_at_server(model: ModelSection, settings: EndpointSection) -> str:
    """The model's name in requests."""
    return settings.served_model or model.path


def served_model(model: ModelSection, settings: EndpointSection) -> Mapping[str, Any]:
    """The server's description of the model; empty if it has none."""
    try:
        served = _list_models(settings)
    except openai.APIError:  # the check of the server, or the first prompt, reports it
        return {}
    name = _find(name_at_server(model, settings), served)
    return served[name] if name else {}


def context_length(served: Mapping[str, Any]) -> int | None:
    """The largest number of tokens that a server's description of a model names; None if it names none."""
    length = served.get("max_model_len")
    return length if isinstance(length, int) and length > 0 else None


def _require_answer(model: ModelSection, settings: EndpointSection, unknown: UserError) -> None:
    """Ask for one token. A server that does not answer within the check's time limit passes, since it is working.

    Args:
        unknown: raised if the server does not know the model.
    Raises:
        UserError: the server fails, or refuses the key or the model.
    """
    name = name_at_server(model, settings)
    with _client_for_checks(settings, max_retries=0) as client:
        try:
            if model.api == "chat":
                client.chat.completions.create(model=name, messages=[{"role": "user", "content": "1"}], max_tokens=1)
            else:
                client.completions.create(model=name, prompt="1", max_tokens=1)
        except openai.APIStatusError as error:
            if _names_unknown_model(error):
                raise unknown from None
            if isinstance(error, openai.InternalServerError):
                raise UserError(
                    f"{settings.base_url}: answers with an error of the server (HTTP {error.status_code}); is it "
                    f"ready? (runtime.endpoint.base_url)"
                ) from None
            if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
                raise _refused_key(settings, error) from None
            # The first prompt will report others.
        except openai.APIError:
            return


def _names_unknown_model(error: openai.APIStatusError) -> bool:
    """Whether a server says, in one of the ways that servers have, that it has no such model."""
    is_named = error.code == "model_not_found" or error.type == "invalid_model"
    return error.status_code == 404 or is_named or _UNKNOWN_MODEL.search(error.message) is not None


def _no_model_or_api(model: ModelSection, settings: EndpointSection) -> UserError:
    name = name_at_server(model, settings)
    return UserError(
        f"{settings.base_url}: the server has no model {name!r} ({_model_setting(settings)}) or does not offer "
        f"{model.api} (model.api)"
    )


def _refused_key(settings: EndpointSection, error: openai.APIStatusError) -> UserError:
    variable = settings.api_key_env or "OPENAI_API_KEY"
    return UserError(
        f"{settings.base_url}: refuses the key in {variable} (HTTP {error.status_code}) (runtime.endpoint.api_key_env)"
    )


def _unknown_model(model: ModelSection, settings: EndpointSection, hint: str) -> UserError:
    name = name_at_server(model, settings)
    return UserError(f"{settings.base_url}: serves no model {name!r} ({_model_setting(settings)}){hint}")


def _model_setting(settings: EndpointSection) -> str:
    return "runtime.endpoint.served_model" if settings.served_model else "model.path"


def _list_models(settings: EndpointSection) -> dict[str, Mapping[str, Any]]:
    """The server's description of each model, by its id; empty if the server's JSON does not hold a list."""
    with _client_for_checks(settings, max_retries=1) as client:
        response = client.models.with_raw_response.list().http_response
    try:
        body = response.json()
    except (ValueError, RecursionError):  # such as an HTML page
        raise UserError(
            f"{settings.base_url}: answers, but not as an API of OpenAI's kind, whose address often ends in /v1 "
            f"(runtime.endpoint.base_url)"
        ) from None
    # OpenAI's API has the list in an object; some servers answer with the list alone.
    models = body.get("data") if isinstance(body, dict) else body
    if not isinstance(models, list):
        return {}
    return {each["id"]: each for each in models if isinstance(each, dict) and isinstance(each.get("id"), str)}


def _client_for_checks(settings: EndpointSection, max_retries: int) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=settings.base_url,
        api_key=read_api_key(settings),
        timeout=_CHECK_TIMEOUT_SECONDS,
        max_retries=max_retries,
    )


def _find(name: str, served: Mapping[str, Any]) -> str | None:
    """The id of the model with this name. Ollama lists `name:tag` and accepts `name`."""
    if name in served:
        return name
    return next((each for each in served if each.startswith(f"{name}:")), None)
