"""Conversations as text: ChatML, or whatever template a tokenizer brings.

    <|im_start|>user
    Hello.<|im_end|>
    <|im_start|>assistant
    Good morrow.<|im_end|>

A template is jinja2 text inside tokenizer_config.json, the same that transformers, vLLM and llama.cpp run, here in a
sandbox since it may come from a stranger. What people say inside a message is never a control token, even when they
spell one: see `encode_chat`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clockhand.errors import ClockhandError

if TYPE_CHECKING:
    from clockhand.data.tokenizer import Tokenizer

Message = Mapping[str, Any]
PRIVATE_USE = range(0xE000, 0xF900)  # characters to which Unicode promises never to give a meaning

# Starts with bos because every document the model has seen does.
CHATML = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(
    messages: Sequence[Message], add_generation_prompt: bool = False, template: str = CHATML, **variables: Any
) -> str:
    """The conversation as one text, control tokens spelled out.

    `add_generation_prompt` opens the assistant's turn. `variables` are further names the template may read, such as
    bos_token (absent ones are empty). Raises `ClockhandError` for a message without role or content, and for a template
    that fails or refuses the conversation.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    _check(messages)
    # The same settings and helpers as in transformers, since the templates are written for it.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )
    except Exception as error:  # a template is a program of its author, and may fail in any way
        raise ClockhandError(f"the chat template cannot render this conversation: {error}") from None


def encode_chat(
    tokenizer: "Tokenizer", messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any
) -> list[int]:
    """The ids of a conversation in the tokenizer's own template; control tokens come from the template alone."""
    if tokenizer.chat_template is None:
        raise ClockhandError("this tokenizer has no chat template")
    # A character that nobody has written goes inside every special token that somebody has. The special tokens left in
    # the rendered text are then the template's own, and the mark comes out again when the text between is encoded.
    written = json.dumps([messages, variables], ensure_ascii=False)
    mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in written)

    def defused(value: Any) -> Any:
        if isinstance(value, str):
            for spelling in tokenizer.special_tokens:
                value = value.replace(spelling, spelling[:1] + mark + spelling[1:])
            return value
        if isinstance(value, Mapping):
            return {key: defused(each) for key, each in value.items()}
        return [defused(each) for each in value] if isinstance(value, list | tuple) else value

    spelled = {id: spelling for spelling, id in tokenizer.special_tokens.items()}
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    known = {name: spelled[id] for name, id in names.items() if id in spelled}
    text = render(defused(messages), add_generation_prompt, tokenizer.chat_template, **known, **defused(variables))
    return tokenizer.encode_control(text, mark)


def _check(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ClockhandError(f"message {number} must be an object with a role, such as 'user', and a content")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ClockhandError(f"message {number} must have a content that is text")
