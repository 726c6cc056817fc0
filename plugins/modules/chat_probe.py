#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/chat_probe.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: chat_probe
short_description: Ask an OpenAI-compatible endpoint for streamed chat completions
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Runs on a node and needs only Python's standard library.
  - Sends the same prompt O(repeat) times, one after the other, and reads each stream to its end.
  - Fails unless every answer holds text, a finish reason and the final C([DONE]); see O(fail_on_state).
options:
  url:
    description: Address of the frontend without path, C(http://HOST:PORT).
    type: str
    required: true
  model:
    description: Name that the endpoint lists.
    type: str
    required: true
  prompt:
    description: What to ask. Without it a prompt that nobody has sent before is made of O(prompt_words) words.
    type: str
  prompt_words:
    description: Least number of tokens of the made prompt.
    type: int
    default: 40
  max_tokens:
    description: Most tokens of an answer. A model that reasons needs room to get past its thinking.
    type: int
    default: 16
  repeat:
    description: How often the prompt is sent.
    type: int
    default: 1
  timeout_seconds:
    description: Longest silence of the server.
    type: int
    default: 120
  fail_on_state:
    description: Fail when an answer is not ok. Otherwise only RV(state) says so.
    type: bool
    default: true
attributes:
  check_mode:
    description: Asks nothing in check mode and returns RV(state) C(skipped).
    support: partial
"""

EXAMPLES = r"""
- name: Ask for one completion
  goodput.spark.chat_probe:
    url: http://192.0.2.11:8000
    model: nemotron
    prompt: Say hello.

- name: See that a repeated prompt comes out of the cache
  goodput.spark.chat_probe:
    url: http://192.0.2.11:8000
    model: nemotron
    prompt_words: 1900
    repeat: 2
"""

RETURN = r"""
state:
  description: C(ok), C(incomplete) or C(failed), the worst of all answers; C(skipped) in check mode.
  type: str
  returned: always
reason:
  description: Why it is not ok.
  type: str
  returned: always
prompt:
  description: What was sent.
  type: str
  returned: when not skipped
answers:
  description: One entry a request.
  type: list
  elements: dict
  returned: when not skipped
  contains:
    state:
      description: As RV(state).
      type: str
    reason:
      description: Why it is not ok.
      type: str
    status:
      description: HTTP status; 0 without an answer.
      type: int
    text:
      description: The answer.
      type: str
    reasoning:
      description: Reasoning content of the answer.
      type: str
    finish_reason:
      description: For example C(length).
      type: str
    done:
      description: Whether C([DONE]) came.
      type: bool
    chunks:
      description: Data chunks of the stream.
      type: int
    prompt_tokens:
      description: From the usage chunk.
      type: int
    completion_tokens:
      description: From the usage chunk.
      type: int
    cached_tokens:
      description: Prompt tokens read from a cache; null when the server does not say.
      type: int
    workers:
      description: Hexadecimal ids of the Dynamo workers that answered.
      type: list
      elements: str
    seconds:
      description: Until the end of the stream.
      type: float
    first_chunk_seconds:
      description: Until the first text.
      type: float
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import chat_probe as logic

ORDER = ("failed", "incomplete", "ok")


def argument_spec() -> dict[str, Any]:
    return {
        "url": {"type": "str", "required": True},
        "model": {"type": "str", "required": True},
        "prompt": {"type": "str"},
        "prompt_words": {"type": "int", "default": 40},
        "max_tokens": {"type": "int", "default": 16},
        "repeat": {"type": "int", "default": 1},
        "timeout_seconds": {"type": "int", "default": 120},
        "fail_on_state": {"type": "bool", "default": True},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    for name in ("prompt_words", "max_tokens", "repeat", "timeout_seconds"):
        if params[name] < 1:
            module.fail_json(msg=f"{name} is {params[name]}, required: at least 1")
    if module.check_mode:
        module.exit_json(changed=False, state="skipped", reason="check mode")
    content = params["prompt"] or logic.prompt(params["prompt_words"])
    answers = []
    for _request in range(params["repeat"]):
        try:
            answers.append(
                logic.ask(params["url"], params["model"], content, params["max_tokens"], params["timeout_seconds"])
            )
        except ValueError as error:
            module.fail_json(msg=str(error))
        if answers[-1].state == "failed":
            break
    state = min((answer.state for answer in answers), key=ORDER.index)
    reason = "; ".join(answer.reason for answer in answers if answer.reason)
    result = {"state": state, "reason": reason, "prompt": content, "answers": [answer.facts() for answer in answers]}
    if state != "ok" and params["fail_on_state"]:
        module.fail_json(
            msg=f"chat completion of {params['model']} through {params['url']} is {state}: {reason}. "
            "Read `journalctl -u goodput-frontend` on the first node and `journalctl -u goodput-worker` on every node.",
            **result,
        )
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
