"""EBNF means the same here as to an independent parser; what is wrong with it is said with its line."""

from __future__ import annotations

import random
import re

import lark
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.grammar import GrammarError
from tests.api_server.constraints.vocabulary import allows, compiled

JSON_EBNF = r"""
# JSON, as llama.cpp has it
root   ::= value
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (member ("," ws member)*)? "}" ws
member ::= string ":" ws value
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= [ \t\n]*
"""

NODES = st.recursive(
    st.one_of(
        st.sampled_from(['"a"', '"ab"', '"b"', '""', "[ab]", "[^a]", "[a-c]", '"é"', r'"\u00e9"', r"[\x61]"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + " ".join(parts) + ")"),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + " | ".join(parts) + ")"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "{1,3}"])).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


def as_regex(ebnf: str) -> str:
    """The same without recursion, for Python's own engine: only the texts are written otherwise."""
    unquoted = re.sub(r'"((?:[^"\\]|\\.)*)"', r"(?:\1)", ebnf)
    return re.sub(r"(?<!\[) (?!\])", "", unquoted.replace(" | ", "|"))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(NODES, st.lists(st.text("abcdé", max_size=6), min_size=3, max_size=3))
def test_without_recursion_it_is_exactly_the_regular_expression(node: str, texts: list[str]) -> None:
    pattern = as_regex(node)
    try:
        grammar = compiled("ebnf", f"root ::= {node}")
    except GrammarError:
        # Only a grammar of nothing but the empty text may be refused.
        assert all(re.fullmatch(pattern, text) is None for text in texts if text)
        return
    for text in [*texts, ""]:
        assert allows(grammar, text) == (re.fullmatch(pattern, text) is not None), (node, text)


def test_json() -> None:
    grammar = compiled("ebnf", JSON_EBNF)
    for text in ('{"a": [1, -2.5e3, {"b": null}], "é\\n": "\\u00e9"}', "[]", '"x"', "  0"[2:], "[true,\nfalse]"):
        assert allows(grammar, text), text
    for text in ("{", "{a: 1}", "[1,]", '"\\x"', "'a'", "nul", ""):
        assert not allows(grammar, text), text


def test_recursive_grammars_agree_with_lark() -> None:
    term = '"(" expr ")" | "f" "(" expr ("," expr)* ")"'
    ebnf = f'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | {term}'
    judge = lark.Lark(f'start: expr\nexpr: term (("+" | "-") term)*\nterm: /[0-9]+/ | {term}')
    grammar = compiled("ebnf", ebnf)
    for _ in range(150):
        text = "".join(random.choices("01+-()f,", k=random.randint(1, 9)))
        try:
            judge.parse(text)
        except lark.exceptions.LarkError:
            assert not allows(grammar, text), text
        else:
            assert allows(grammar, text), text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("", "there is no rule `root ::= ...`"),
        ('a ::= "x"', "there is no rule `root ::= ...`"),
        ("root ::= x", "the rule root uses x, which is not there"),
        ('root ::= "a" (', "line 1: a \\) is missing"),
        ('\nroot ::= "a"\nroot ::= "b"', "line 3: the rule root is there twice"),
        ('root ::= "a', "line 1: '\"a' is not understood"),
        ('x\nroot ::= "a"', "line 1: a rule `name ::= ...` must begin here, not 'x'"),
        ("root ::= [z-a]", "line 1: the range z-a ends before it begins"),
        ("root ::= []", "line 1: a class of characters is empty"),
        ('root ::= "a"{3,2}', r"the repetition \{3,2\} ends before it begins"),
        ('root ::= "a"{10001}', r"the repetition \{10001\} is above 10000"),
        ('root ::= (= "a") "b"', "line 1: looking ahead with"),
        (r"root ::= [\uD800]", "U\\+D800 is no character"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "nested more than 100 deep"),
        ("root ::= root", "no text can match it|NoExtension"),
        (
            "\n".join(["root ::= a0", *(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(40)), 'a40 ::= "x"']),
            "more than 262144",
        ),
    ],
)
def test_what_is_wrong_is_said(source: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        compiled("ebnf", source)
