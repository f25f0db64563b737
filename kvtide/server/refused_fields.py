"""Fields of OpenAI's API and of other servers that change an answer and are not honoured here.

A field that is ignored would leave its client with a wrong belief about the answer. So it is
refused, unless its value asks for what happens anyway. Hints for a service that change no answer
are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvtide.engine import RequestError

EMPTY: tuple[object, ...] = (False, "", [], {})
"""`False` equals 0."""


class RefusedField(NamedTuple):
    """`neutral` are the values that ask for nothing, beside null."""

    remedy: str
    neutral: tuple[object, ...] = EMPTY


def _fields(remedies: Mapping[str, str]) -> dict[str, RefusedField]:
    return {name: RefusedField(remedy) for name, remedy in remedies.items()}


_JSON_SCHEMA = RefusedField("use response_format of type json_schema", ("",))
GRAMMARS = {
    **_fields(
        {
            "grammar": "use regex, choice or a JSON schema",
            "ebnf": "use regex, choice or a JSON schema",
            "stop_regex": "use stop, or regex for the whole answer",
            "guided_regex": "use regex",
            "guided_choice": "use choice",
            "guided_grammar": "use regex, choice or a JSON schema",
            "guided_decoding_backend": "leave it out: there is one",
            "guided_whitespace_pattern": "leave it out: JSON has up to 20 spaces in a row",
            "structured_outputs": "use response_format, regex or choice",
        }
    ),
    "json_schema": _JSON_SCHEMA,
    "guided_json": _JSON_SCHEMA,
}
SAMPLING = {
    **_fields(
        {
            "min_tokens": "send ignore_eos with max_tokens for an answer of one length",
            "use_beam_search": "send n",
            "bad_words": "ban their tokens with logit_bias",
            "allowed_token_ids": "send choice, regex or logit_bias",
            "custom_logit_processor": "send logit_bias",
            "logits_processors": "send logit_bias",
            "repetition_detection": "send repetition_penalty",
            "thinking_token_budget": "send max_tokens",
            "t_max_predict_ms": "send max_tokens",
            "mirostat": "send temperature, top_p or min_p",
            "dynatemp_range": "send temperature",
            "dry_multiplier": "send repetition_penalty",
            "xtc_probability": "send temperature, top_p or min_p",
            "samplers": "leave it out: their order is fixed",
            "lora": "merge the adapter into the weights",
            "lora_path": "merge the adapter into the weights",
        }
    ),
    "n_predict": RefusedField("send max_tokens", (-1,)),
    "length_penalty": RefusedField("leave it out: there is no beam search", (1,)),
    "typical_p": RefusedField("send top_p or min_p", (1,)),
    "top_n_sigma": RefusedField("send top_p or min_p", (-1, 0)),
    "repeat_penalty": RefusedField("send repetition_penalty", (1,)),
}
PROMPT = {
    **_fields(
        {
            "truncate_prompt_tokens": "send a prompt that fits",
            "documents": "put them into a message",
            "chat_template": "start the server with --chat-template",
            "continue_final_message": "end with a message of the user",
            "input_ids": "send token ids as the prompt of /v1/completions",
            "prompt_embeds": "send a text or token ids",
        }
    ),
    "add_generation_prompt": RefusedField("send a prompt to /v1/completions", (True,)),
}
OUTPUT = {
    **_fields(
        {
            "prompt_logprobs": "send echo with logprobs to /v1/completions",
            "n_probs": "send logprobs",
            "logprob_token_ids": "send top_logprobs",
            "return_tokens_as_token_ids": "send return_token_ids",
            "return_hidden_states": "leave it out",
            "include_stop_str_in_output": "add the stop string in the client",
            "no_stop_trim": "add the stop string in the client",
            "audio": "send text",
            "prediction": "leave it out",
            "web_search_options": "search in a tool of the client",
        }
    ),
    "modalities": RefusedField("send text", (*EMPTY, ["text"])),
    "skip_special_tokens": RefusedField("send return_token_ids to see them", (True,)),
    "separate_reasoning": RefusedField("start the server with --reasoning-parser none", (True,)),
    "include_reasoning": RefusedField("drop reasoning_content in the client", (True,)),
}
EVERYWHERE = GRAMMARS | SAMPLING | PROMPT | OUTPUT

ONE_CHOICE = RefusedField("ask /v1/chat/completions for several choices", (1,))
LOGPROBS = _fields(
    {
        "logprobs": "ask /v1/chat/completions for them",
        "top_logprobs": "ask /v1/chat/completions for logprobs",
        "return_token_ids": "ask /v1/chat/completions for them",
    }
)

COMPLETION = {
    **EVERYWHERE,
    **_fields(
        {
            "suffix": "put it into the prompt",
            "tools": "send messages and tools to /v1/chat/completions",
            "top_logprobs": "send their number as logprobs",
        }
    ),
    "best_of": RefusedField("ask for n choices instead", (*EMPTY, 1)),
}
CHAT = {
    **EVERYWHERE,
    **_fields(
        {
            "functions": "send tools instead",
            "function_call": "send tool_choice instead",
            "echo": "ask /v1/completions for the prompt",
            "add_special_tokens": "leave it out: the chat template writes them",
        }
    ),
}
RESPONSES = {
    **EVERYWHERE,
    **LOGPROBS,
    **_fields(
        {
            "background": "wait for the response, or stream it",
            "conversation": "use previous_response_id, or send all items as input",
            "prompt": "send its text as instructions or input",
            "response_format": "send text.format",
            "max_tokens": "send max_output_tokens",
            "max_completion_tokens": "send max_output_tokens",
            "max_tool_calls": "send parallel_tool_calls, or count them in the client",
        }
    ),
    "truncation": RefusedField("send disabled, and a shorter input", ("disabled",)),
    "n": ONE_CHOICE,
}
MESSAGES = {
    **EVERYWHERE,
    **LOGPROBS,
    **_fields(
        {
            "container": "leave it out, and run code in tools of your own",
            "mcp_servers": "connect them in the client, and send their tools",
            "response_format": "send output_config.format",
            "stop": "send stop_sequences",
            "max_completion_tokens": "send max_tokens",
            "thread": "send all messages",
            "compaction": "ask for a summary in a message",
        }
    ),
    "n": ONE_CHOICE,
}
"""By route; a chat's fields are those of its prompt too, in `/tokenize` and `/v1/prefetch`."""


def refuse(body: Mapping[str, object], fields: Mapping[str, RefusedField]) -> None:
    """`RequestError` for a body that asks for what these fields stand for."""
    for name, field in fields.items():
        value = body.get(name)
        if value is None or value in field.neutral:
            continue
        shown = name if field.neutral == EMPTY else f"{name} {value!r:.60}"
        raise RequestError(
            f"{shown} is not supported; {field.remedy}", "unsupported_parameter", name
        )
