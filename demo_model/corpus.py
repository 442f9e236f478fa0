"""The corpus: conversations put together from the skills' exchanges, without end and with a seed.

Knows the mixture, how exchanges are chained into conversations,
and that held-out exchanges never enter. Does not know tokens
(see `train_tokenizer`) or training.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from demo_model import words
from demo_model.exchange import Exchange, Message
from demo_model.skills import (
    arithmetic,
    facts,
    json_answers,
    lists,
    memory,
    small_talk,
    stories,
    tool_definitions,
    tool_use,
    unknown,
)

Draw = Callable[[random.Random], Exchange]

# Share of exchanges by skill in plain conversations.
PLAIN: dict[Draw, float] = {
    arithmetic.draw: 27,
    json_answers.draw: 17,
    lists.draw: 14,
    lists.draw_words: 14,
    facts.draw: 11,
    facts.draw_capital: 7,
    facts.draw_long: 1.2,
    small_talk.draw: 14,
    unknown.draw: 5,
    stories.draw: 1.8,
}  # fmt: skip

# The first documents are exercises in copying, so that the copying circuit of the first weights (see
# `starting_weights`) is strengthened before other skills would overwrite it. Then their share falls in a line.
EXERCISES: tuple[Draw, ...] = (lists.draw_copying, json_answers.draw_copying)
_ONLY_EXERCISES = 4_000
NO_EXERCISES = 30_000


def exercise_share(drawn: int) -> float:
    return min(1.0, max(0.0, (NO_EXERCISES - drawn) / (NO_EXERCISES - _ONLY_EXERCISES)))


_SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are tokenyard's demo model.", "Be brief.",
    "You are a friendly assistant.",
    "Answer the user's questions.", "You are a helpful, honest and harmless assistant.",
    "You are a concise assistant. Answer in one sentence.",
    "You are an assistant that answers in JSON when asked.", "You are a helpful AI assistant.", "Today is Monday.",
    "The user is a developer.",
)  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """What the chat template is given. `thinking` conversations carry a thought in their last turns."""

    messages: list[Message]
    tools: tuple[Message, ...] = ()
    thinking: bool = False


@dataclass(frozen=True)
class RawText:
    """Text with no chat around it, for requests that continue a plain prompt.

    `given` are spans of characters that nobody could predict (the operands of a sum), so nothing is learned from them.
    """

    text: str
    given: tuple[tuple[int, int], ...] = ()


@dataclass
class Corpus:
    """An endless source of training documents; the same seed gives the same documents."""

    seed: int
    drawn: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def documents(self) -> Iterator[Conversation | RawText]:
        while True:
            yield self._document()

    def _document(self) -> Conversation | RawText:
        self.drawn += 1
        if self.rng.random() < exercise_share(self.drawn):
            exercises = [self._fresh(self.rng.choice(EXERCISES)) for _ in range(self.rng.choice((1, 1, 2, 3)))]
            return Conversation([message for each in exercises for message in shown(each.messages, thinking=False)])
        kinds = ("plain", "tools", "memory", "system", "raw", "drill")
        kind = self.rng.choices(kinds, (54, 28, 3, 2, 2, 11))[0]
        if kind == "raw":
            return RawText(self._raw())
        if kind == "drill":
            return self._drill()
        thinking = self.rng.random() < 0.25
        if kind == "tools":
            return self._with_tools(thinking)
        if kind == "memory":
            return self._with_memory(thinking)
        if kind == "system":
            exchange = self._fresh(small_talk.draw_named)
            return Conversation(
                [{"role": "system", "content": exchange.system}, *shown(exchange.messages, thinking)], thinking=thinking
            )
        return self._plain(thinking)

    def _fresh(self, draw: Draw) -> Exchange:
        """An exchange that is not held out."""
        while (exchange := draw(self.rng)).held_out:
            pass
        return exchange

    def _several(self, count: int) -> list[Message]:
        """Some exchanges in a row; now and then all of one skill, as a person who tries something out would do."""
        draws = self.rng.choices(tuple(PLAIN), tuple(PLAIN.values()), k=count)
        if count > 2 and self.rng.random() < 0.3:
            draws = [
                self.rng.choice((arithmetic.draw, lists.draw, json_answers.draw, facts.draw, lists.draw_words))
            ] * count
        return [message for draw in draws for message in self._fresh(draw).messages]

    def _count(self) -> int:
        return self.rng.choices((1, 2, 3, 5, 8, 12), (38, 22, 18, 13, 7, 2))[0]

    def _plain(self, thinking: bool) -> Conversation:
        messages = self._several(self.rng.choice((1, 1, 1, 2)) if thinking else self._count())
        return Conversation([*self._system(), *shown(messages, thinking)], thinking=thinking)

    def _system(self) -> list[Message]:
        if self.rng.random() < 0.6:
            return []
        text = self.rng.choice(_SYSTEMS)
        if self.rng.random() < 0.2:
            text += f" The secret word is {words.a_word(self.rng)}."
        return [{"role": "system", "content": text}]

    def _with_memory(self, thinking: bool) -> Conversation:
        while (exchange := memory.recall(parts := memory.draw_parts(self.rng), ())).held_out:
            pass
        told, asked, _ = parts
        between = self._several(self.rng.choice((0, 0, 1, 1, 2, 3, 4)))
        if self.rng.random() < 0.06:
            exchange = self._fresh(memory.draw)
            return Conversation([*self._system(), *shown(exchange.messages, thinking)], thinking=thinking)
        return Conversation([*self._system(), *shown([*told, *between, *asked], thinking)], thinking=thinking)

    def _with_tools(self, thinking: bool) -> Conversation:
        if self.rng.random() < 0.18:
            exchange = self._fresh(
                self.rng.choice((small_talk.draw, small_talk.draw, facts.draw, lists.draw, stories.draw))
            )
            return Conversation(
                [*self._system(), *shown(exchange.messages, thinking)], tool_use.draw_tools(self.rng), thinking
            )
        exchanges, tools = self._tool_exchanges(1 if thinking else self.rng.choice((1, 1, 2, 3)))
        if self.rng.random() < 0.15:
            exchanges = [self._fresh(small_talk.draw), *exchanges]
        messages = [message for exchange in exchanges for message in exchange.messages]
        return Conversation([*self._system(), *shown(messages, thinking)], tools, thinking)

    def _tool_exchanges(self, count: int) -> tuple[list[Exchange], tuple[Message, ...]]:
        """Questions for different tools, all of them offered from the beginning; only the last may stop at its call."""
        exchanges: list[Exchange] = []
        tools: list[Message] = []
        while len(exchanges) < count:
            asked, answered = tool_use.draw_pair(self.rng)
            if asked.held_out or (tools and tool_definitions.overlapping(tools, asked.tools[:1])):
                continue
            last = len(exchanges) == count - 1
            exchanges.append(asked if last and self.rng.random() < 0.45 else answered)
            tools += asked.tools if count == 1 else asked.tools[:1]
        self.rng.shuffle(tools)
        return exchanges, tuple(tools)

    def _drill(self) -> RawText:
        """Many sums with nothing between: a few in each conversation would not be enough."""
        ask = self._equation if self.rng.random() < 0.5 else self._worked_sum
        text, given = "", []
        for _ in range(self.rng.randint(6, 14)):
            question, answer = ask()
            given.append((len(text), len(text) + len(question)))
            text += f"{question}{answer}\n"
        return RawText(text, tuple(given))

    def _equation(self) -> tuple[str, str]:
        question, equals, result = self._fresh(arithmetic.draw_equation).messages[-1]["content"].partition(" =")
        return question, equals + result

    def _worked_sum(self) -> tuple[str, str]:
        """The thought that leads to the sum, as the model writes it when thinking is on."""
        reply = self._fresh(arithmetic.draw_equation).messages[-1]
        return reply["content"].partition(" =")[0] + ": ", reply["thought"]

    def _raw(self) -> str:
        kind = self.rng.randrange(5)
        if kind == 0:
            return stories.story(self.rng, self.rng.choice(stories.HEROES), words.a_name(self.rng))
        if kind == 1:
            start = self.rng.choice((1, 1, self.rng.randint(0, 80)))
            return ", ".join(map(str, range(start, start + self.rng.randint(8, 20))))
        if kind == 2:
            return " ".join(facts.plain_sentence(self.rng) for _ in range(self.rng.randint(1, 5)))
        exchange = self._fresh(
            self.rng.choice((facts.draw, facts.draw, facts.draw_capital, arithmetic.draw, small_talk.draw, lists.draw))
        )
        question, answer = exchange.messages
        form = self.rng.choice(("{q}\n{a}", "{q}\n\n{a}", "{q} {a}", "Question: {q}\nAnswer: {a}", "Q: {q}\nA: {a}"))
        return form.format(q=question["content"], a=answer["content"])


def shown(messages: tuple[Message, ...] | list[Message], thinking: bool) -> list[Message]:
    """The messages as the template takes them: thoughts become reasoning_content, or vanish when thinking is off."""
    result: list[Message] = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name != "thought"}
        if thinking and "thought" in message:
            plain["reasoning_content"] = message["thought"]
        result.append(plain)
    return result
