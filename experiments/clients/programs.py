"""What clients that are not ours ask of a server; runs where they are installed, without kvlab.

python experiments/clients/programs.py NAME URL MODEL
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field

QUESTION = "What is the weather in Paris?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


def openai_parse(url: str, model: str) -> object:
    """OpenAI's client, a schema made of a class."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none")
    messages: Any = [{"role": "user", "content": "Describe a person."}]
    found = client.chat.completions.parse(model=model, messages=messages, response_format=Person, max_tokens=60)
    return found.choices[0].message.parsed


def openai_responses(url: str, model: str) -> object:
    """OpenAI's client, /v1/responses."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none")
    return client.responses.parse(
        model=model, input="Describe a person.", text_format=Person, max_output_tokens=60
    ).output_parsed


def instructor_json(url: str, model: str, mode: str = "JSON_SCHEMA") -> object:
    """instructor, by response_format."""
    import instructor
    import openai

    client = instructor.from_openai(
        openai.OpenAI(base_url=url, api_key="none"), mode=getattr(instructor.Mode, mode)
    )
    messages: Any = [{"role": "user", "content": "Describe a person."}]
    return client.chat.completions.create(
        model=model, messages=messages, response_model=Person, max_tokens=80, max_retries=0
    )


def instructor_tools(url: str, model: str) -> object:
    """instructor, by a tool that has to be called."""
    return instructor_json(url, model, "TOOLS")


def _langchain(url: str, model: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=80, temperature=0)


def langchain_structured(url: str, model: str) -> object:
    """LangChain's with_structured_output, by a schema and by a call."""
    found = [
        _langchain(url, model).with_structured_output(Person, method=method).invoke("Describe a person.")
        for method in ("json_schema", "function_calling")
    ]
    assert all(isinstance(each, Person) for each in found), found
    return found[-1]


def langchain_tools(url: str, model: str) -> object:
    """LangChain's bind_tools, whole and streamed."""
    bound = _langchain(url, model).bind_tools([get_weather], tool_choice="get_weather")
    whole, joined = bound.invoke(QUESTION).tool_calls, None
    for chunk in bound.stream(QUESTION):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None
    assert [call["args"] for call in joined.tool_calls] == [call["args"] for call in whole]
    return whole


def pydantic_ai(url: str, model: str) -> object:
    """pydantic-ai: an agent whose output is a call, and one whose output is a schema."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    settings: Any = {"temperature": 0, "max_tokens": 80}

    async def ask() -> list[object]:
        forms: list[Any] = [Person, NativeOutput(Person)]
        return [(await Agent(chat, output_type=form, model_settings=settings).run("Describe a person.")).output
                for form in forms]  # fmt: skip

    return asyncio.run(ask())


def litellm_tools(url: str, model: str) -> object:
    """LiteLLM, a schema and a tool."""
    import litellm

    about: Any = {"model": f"hosted_vllm/{model}", "api_base": url, "api_key": "none", "max_tokens": 80}
    messages = [{"role": "user", "content": "Describe a person."}]
    found = litellm.completion(messages=messages, response_format=Person, **about)
    person = Person.model_validate_json(found.choices[0].message.content)
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    call = litellm.completion(
        messages=[{"role": "user", "content": QUESTION}], tools=[tool], tool_choice="required", **about
    )
    return person, call.choices[0].message.tool_calls[0].function


def llm_schema(url: str, model: str) -> object:
    """`llm --schema`, with a model of extra-openai-models.yaml."""
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        entry = {
            "model_id": "kv",
            "model_name": model,
            "api_base": url,
            "api_key_name": "kv",
            "supports_schema": True,
        }
        with open(os.path.join(folder, "extra-openai-models.yaml"), "w", encoding="utf-8") as file:
            json.dump([entry], file)  # JSON is YAML
        with open(os.path.join(folder, "keys.json"), "w", encoding="utf-8") as file:
            json.dump({"kv": "none"}, file)
        command = [sys.executable, "-m", "llm", "-m", "kv", "--no-stream", "-o", "max_tokens", "80", "--schema"]
        schema = json.dumps(Person.model_json_schema())
        done = subprocess.run(
            [*command, schema, "Describe a person."],
            env={**os.environ, "LLM_USER_PATH": folder}, capture_output=True, text=True, check=True,
        )  # fmt: skip
    return Person.model_validate_json(done.stdout)


CLIENTS: dict[str, Callable[[str, str], object]] = {
    each.__name__: each
    for each in (
        openai_parse,
        openai_responses,
        instructor_json,
        instructor_tools,
        langchain_structured,
        langchain_tools,
        pydantic_ai,
        litellm_tools,
        llm_schema,
    )
}


if __name__ == "__main__":
    name, server, served = sys.argv[1:]
    print(repr(CLIENTS[name](f"{server}/v1", served)))
