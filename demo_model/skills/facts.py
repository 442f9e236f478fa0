"""Skill: facts about tokenyard, about serving language models, and capitals.

Knows each fact once, and the ways to ask for it.

The long explanations at the end are there so that a streamed answer has something to stream.
"""

import random

from demo_model import words
from demo_model.exchange import Exchange, ask, reword

SKILL = "tokenyard facts"
CAPITAL_SKILL = "capitals"
LONG_SKILL = "long explanations"

# Subject -> the sentence about it. Asked through _WHAT, so the wording of the question varies by itself.
SUBJECTS: dict[str, str] = {
    "tokenyard": (
        "tokenyard is a server for language, vision, embedding, speech and image models. It sorts requests "
        "into batches and keeps every device busy."
    ),
    "the API server": (
        "The API server is the HTTP process of tokenyard. It parses requests, renders chat templates, "
        "tokenizes and streams text. It holds no state and no torch."
    ),
    "the scheduler": (
        "The scheduler is one process per served model. It admits requests, orders them, builds batches and "
        "gives out KV blocks."
    ),
    "the model worker": (
        "The model worker is one process per device. It holds the weights and the KV cache, runs the forward "
        "pass and samples tokens."
    ),
    "the supervisor": "The supervisor starts the processes of tokenyard, watches them, and restarts one that dies.",
    "the interfaces folder": "The interfaces folder holds every type that crosses a process, and nothing else.",
    "the shared folder": (
        "The shared folder holds plumbing that two or more processes use: sockets, settings, logs, metrics."
    ),
    "the deploy folder": (
        "The deploy folder holds the tokenyard command, the supervisor, the embedded model and files for "
        "containers, systemd and Kubernetes."
    ),
    "the tests folder": (
        "The tests folder mirrors the other folders, file for file, and adds tests of the whole system."
    ),
    "the embedded model": (
        "The embedded model is a very small chat model that ships with tokenyard, so that everything can be "
        "tried with no network."
    ),
    "the KV cache": (
        "The KV cache keeps the keys and values of past tokens, so that each new token needs only one step of work."
    ),
    "the paged KV cache": (
        "The paged KV cache keeps keys and values in blocks of 16 tokens, so that no memory is lost to gaps."
    ),
    "a KV block": "A KV block is a piece of the KV cache that holds the keys and values of 16 tokens.",
    "a block table": "A block table lists the KV blocks that belong to one sequence, in order.",
    "the prefix cache": (
        "The prefix cache reuses the KV blocks of a prompt that was seen before, so that its prefill is skipped."
    ),
    "continuous batching": (
        "Continuous batching lets requests join and leave the batch at every step, so that no request waits "
        "for a whole batch to end."
    ),
    "chunked prefill": (
        "Chunked prefill cuts a long prompt into pieces and mixes them with decode steps, so that nobody "
        "waits for one long prompt."
    ),
    "preemption": "Preemption takes the KV blocks of one request when memory runs out, and recomputes them later.",
    "prefill": "Prefill is the first pass over the whole prompt. It fills the KV cache and gives the first token.",
    "decode": "Decode is the phase that makes one token per step for each running sequence.",
    "a token": (
        "A token is a piece of text, often a word or a part of a word, that the model reads or writes in one step."
    ),
    "a tokenizer": "A tokenizer cuts text into tokens and turns tokens back into text.",
    "a chat template": "A chat template turns a list of messages into the one text that the model reads.",
    "a step": (
        "A step is one forward pass over all rows of the batch. The scheduler sends it and the worker answers "
        "with new tokens."
    ),
    "a row": "A row is the 32-bit number that names a running sequence on a worker.",
    "ZeroMQ": "ZeroMQ is the message library between the processes of tokenyard. It uses DEALER and ROUTER sockets.",
    "msgpack": "msgpack is the binary format of every message between the processes. There is no pickle on any wire.",
    "TTFT": "TTFT is the time to first token: from sending a request to seeing its first token.",
    "ITL": "ITL is the inter-token latency: the time between two tokens of one stream.",
    "TPOT": "TPOT is the time per output token, without the first one.",
    "temperature": (
        "Temperature makes sampling wilder when it is high and calmer when it is low. At zero the best token "
        "is always taken."
    ),
    "top-p": "Top-p keeps the smallest set of tokens whose probability adds up to p, and samples from it.",
    "top-k": "Top-k keeps the k most likely tokens and samples from them.",
    "min-p": "Min-p drops the tokens that are much less likely than the best one.",
    "greedy decoding": "Greedy decoding takes the most likely token at every step.",
    "a seed": "A seed fixes the random numbers, so that the same request draws the same tokens again.",
    "a stop string": "A stop string ends the answer when it appears, and it is cut off exactly.",
    "streaming": "Streaming sends each piece of text as soon as its token is sampled.",
    "overlap": "Overlap means that the scheduler sends the next step before the tokens of this one are back.",
    "an epoch": "An epoch numbers the lives of a worker, so that late replies of a dead worker are ignored.",
    "LoRA": "LoRA is a small set of extra weights that adapts a model to a task.",
    "a grammar": "A grammar limits which tokens may come next, so that an answer has the right form, such as JSON.",
    "tokenyard serve": "tokenyard serve starts the server. Without a model name it serves the embedded model.",
    "tokenyard chat": "tokenyard chat opens a chat in the terminal against a running server.",
    "tokenyard doctor": "tokenyard doctor checks torch, the CPU, CUDA, shared memory and ports, and says what to do.",
    "tokenyard version": "tokenyard version prints the version.",
    "make run": "make run makes the environment, installs tokenyard and serves the embedded model on port 8000.",
    "make test": "make test sets everything up and runs every test.",
    "make demo-model": "make demo-model trains the embedded model on two CPU cores in less than 45 minutes.",
    "make bench": "make bench runs the load generator and writes a table, a JSON file and a picture.",
    "make check": "make check runs ruff, mypy and the import rules.",
    "/v1/chat/completions": (
        "/v1/chat/completions is the OpenAI chat endpoint. It takes messages and answers with a message."
    ),
    "/v1/completions": "/v1/completions is the OpenAI endpoint that continues a plain prompt.",
    "/generate": "/generate takes the request of SGLang or the request of TGI and answers in the same dialect.",
    "/generate_stream": "/generate_stream is the streaming endpoint of TGI.",
    "/tokenize": "/tokenize turns a text into tokens.",
    "/health": "/health tells whether the server works.",
    "/metrics": "/metrics shows the figures of the server for Prometheus.",
    "/v1/models": "/v1/models lists the models that are served.",
    "/docs": "/docs shows the OpenAPI page.",
    "Deep Learning": "Deep learning trains large neural networks with many layers on examples.",
    "a neural network": "A neural network is a function with many weights that are learned from examples.",
    "a language model": "A language model predicts the next token of a text.",
    "attention": "Attention lets each token look at the tokens before it and take what it needs.",
    "a transformer": "A transformer is a neural network that is built from layers of attention and small networks.",
    "machine learning": "Machine learning lets a program learn from examples instead of rules.",
    "an embedding": "An embedding is a list of numbers that stands for the meaning of a text.",
}

_WHAT = (
    "What is {x}?", "What's {x}?", "Explain {x}.", "Tell me about {x}.", "Can you explain {x}?", "What does {x} do?",
    "What does {x} mean?", "Describe {x}.",
    "What do you know about {x}?", "Explain {x} to me.", "What is {x} in tokenyard?", "Define {x}.",
    "Say something about {x}.", "What is {x} for?",
    "Please explain {x}.", "I want to know what {x} is.", "Do you know what {x} is?", "What is meant by {x}?",
)  # fmt: skip

# Questions that have their own form.
QUESTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("How do I start the server?", "How do I run tokenyard?", "How can I start tokenyard?",
    "How do I start tokenyard?", "How do I start it?",
      "Which command starts the server?", "How do I use tokenyard?", "How do I get started?"),
     "Type make run, or tokenyard serve. The server listens on port 8000."),
    (("How do I serve my own model?", "How do I serve another model?", "Can I use another model?",
    "How do I load a Hugging Face model?",
      "Can tokenyard serve larger models?", "How do I serve a larger model?"),
     "Type tokenyard serve MODEL, where MODEL is a Hugging Face directory or a hub name."),
    (("Which port does tokenyard use?", "What is the default port?", "On which port does it listen?",
    "What port is it?", "How do I change the port?"),
     "The default port is 8000. PORT= or --port changes it."),
    (("How many processes does tokenyard have?", "Which processes are there?", "What are the processes of tokenyard?",
    "Name the processes of tokenyard.",
      "List the processes of tokenyard.", "Which processes does tokenyard run?"),
     "There are API servers, one scheduler per model and one model worker per device. A supervisor starts them all."),
    (("How do the processes talk to each other?", "How do the processes communicate?", "What connects the processes?",
    "How are messages sent?",
      "What is between the processes?", "Which sockets does tokenyard use?"),
     "They talk over ZeroMQ sockets, and every message is msgpack."),
    (("Why is there no torch in the API server?", "Why does the API server not import torch?",
    "Why no torch in the API process?"),
     "Without torch the API server starts in less than two seconds and stays under 300 MB."),
    (("Why is there no pickle?", "Why no pickle?", "Why does tokenyard not use pickle?", "Is pickle used?"),
     "pickle can run code from a message, so it is never used on any wire."),
    (("Which folders are there?", "What are the folders of tokenyard?", "List the folders of tokenyard.",
    "How is the code organised?",
      "How is tokenyard organised?", "What folders does the project have?", "Name the folders of tokenyard."),
     "The folders are interfaces, shared, api_server, scheduler, model_worker, deploy and tests."),
    (("What happens when a worker dies?", "What if a worker crashes?", "What happens when the worker crashes?",
    "What if the model worker dies?"),
     "The supervisor restarts it, and the scheduler replays its requests. The client only sees a pause."),
    (("What happens when the scheduler dies?", "What if the scheduler crashes?",
    "What happens if the scheduler stops?"),
     "The API servers hold the prompts and tokens, and send them again when the scheduler is back."),
    (("What happens when a client goes away?", "What happens when a client disconnects?",
    "What if the client disconnects?", "What if I close the connection?"),
     "Its request is cancelled within a step, and its KV blocks are freed."),
    (("What happens when the server is full?", "What happens under overload?", "What if there are too many requests?",
    "Are the queues bounded?"),
     "The queues are bounded. The server answers 429 or 503 instead of waiting forever."),
    (("Why is it called tokenyard?", "Where does the name tokenyard come from?", "What does the name mean?",
    "Why this name?", "Why the name tokenyard?"),
     "A switchyard sorts cars into trains. tokenyard sorts requests into batches."),
    (("Which APIs does tokenyard speak?", "Which dialects are there?", "What APIs are supported?",
    "Is tokenyard compatible with OpenAI?",
      "Does it speak the OpenAI API?", "Which dialects does tokenyard know?"),
     "tokenyard speaks the OpenAI, TGI and SGLang dialects over one common core."),
    (("Which endpoints are there?", "List the endpoints.", "What are the endpoints of tokenyard?",
    "Name the endpoints.", "Which endpoints does tokenyard have?"),
     "The main endpoints are /v1/chat/completions, /v1/completions, /generate, /generate_stream, /tokenize, "
     "/health, /info, /v1/models and /metrics."),
    (("Which commands are there?", "List the commands of tokenyard.", "What commands does tokenyard have?",
    "Name the tokenyard commands.", "Which commands can I use?"),
     "The commands are tokenyard serve, tokenyard chat, tokenyard doctor and tokenyard version."),
    (("Does tokenyard need a GPU?", "Do I need a GPU?", "Can it run on a CPU?", "Does it run without a GPU?",
    "Is a GPU needed?"),
     "No. tokenyard runs on a CPU, and on CUDA devices when there are any."),
    (("Does tokenyard need the network?", "Do I need the internet?", "Can I use it offline?", "Does it work offline?"),
     "No. The embedded model ships with tokenyard, so it works with no network."),
    (("Which license does tokenyard have?", "What is the license?", "Is tokenyard open source?", "Is tokenyard free?"),
     "tokenyard is open source under the Apache-2.0 license."),
    (("Which models can tokenyard serve?", "What models does it support?", "Which models are supported?",
    "What can tokenyard serve?"),
     "tokenyard serves decoder models that transformers can load. A model that cannot work is refused with a clear "
     "reason."),
    (("How large is a KV block?", "How many tokens fit in a KV block?", "What is the block size?",
    "How big is a block?"),
     "A KV block holds 16 tokens."),
    (("How do I stop the server?", "How do I end tokenyard?", "How can I stop it?", "What does Ctrl-C do?"),
     "Press Ctrl-C. Running requests finish, and no process or file is left behind."),
    (("How do I see the metrics?", "Where are the metrics?", "How can I monitor tokenyard?", "Is there monitoring?"),
     "Open /metrics. It has the figures for Prometheus."),
    (("What is the sky?", "What colour is the sky?", "Why is the sky blue?", "What is the colour of the sky?"),
     "The sky is blue because air scatters blue light more than red light."),
    (("How many days are in a week?", "How many days does a week have?"), "A week has seven days."),
    (("How many months are in a year?", "How many months does a year have?"), "A year has twelve months."),
    (("How many hours are in a day?", "How many hours does a day have?"), "A day has 24 hours."),
)  # fmt: skip

_CAPITAL = (
    "What is the capital of {x}?", "What's the capital of {x}?", "Capital of {x}?", "Name the capital of {x}.",
    "Which city is the capital of {x}?",
    "Tell me the capital of {x}.", "Do you know the capital of {x}?", "What is {x}'s capital?",
)  # fmt: skip

LONG: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Explain in detail how tokenyard works.", "How does tokenyard work?", "How does tokenyard work in detail?",
    "Give me a long explanation of tokenyard.",
      "Explain the whole of tokenyard.", "Describe tokenyard in detail.", "Explain how tokenyard works.",
      "Write a long text about tokenyard."),
     "tokenyard is made of three kinds of processes.\n\n"
     "First there are the API servers. They read HTTP requests, turn messages into one prompt with the chat "
     "template, cut the prompt into tokens and send it on. "
     "They know nothing of torch, so they start fast and stay small.\n\n"
     "Then there is the scheduler. It decides who runs and when. It gives each request a row and some KV blocks, "
     "and it sends one step after the other to the "
     "workers. A step is a few columns of numbers, so it costs very little.\n\n"
     "Last come the model workers, one for each device. They hold the weights and the KV cache, run the model over "
     "all rows at once and sample one token "
     "for each row. The tokens travel back to the scheduler, from there to the API server, and there they become "
     "text again.\n\n"
     "The text is streamed to the client piece by piece. When a worker dies, nothing is lost: the scheduler knows "
     "every prompt and every token, and plays them again."),
    (("How does a request travel through tokenyard?", "Describe the path of a request.", "What happens to a request?",
    "Follow a request through the server.",
      "Trace a request through tokenyard.", "What happens when I send a request?"),
     "A request goes through seven hops.\n"
     "1. The API server checks the body and maps it to one internal request.\n"
     "2. The tokenizer renders the chat template and makes the tokens.\n"
     "3. The engine client sends the request to the scheduler over a ZeroMQ socket.\n"
     "4. The scheduler admits it, or refuses it with a reason, and gives it a row and KV blocks.\n"
     "5. The model worker runs the step and samples the next token.\n"
     "6. The scheduler sends the results back, one message for each API server.\n"
     "7. The API server turns tokens into text, looks for stop strings, and streams the frames to the client."),
    (("Explain continuous batching in detail.", "How does continuous batching work?",
    "Write a long explanation of continuous batching.",
      "Explain batching in detail.", "How does batching work?"),
     "A model can work on many sequences at once for nearly the price of one, because the weights are read only "
     "once for all of them. So a server wants "
     "large batches.\n\n"
     "The simple way is to wait for a full batch and to run it to its end. Then short answers wait for long ones, "
     "and new requests wait for everybody.\n\n"
     "Continuous batching works step by step. Before each step the scheduler looks at the queue. A request that has "
     "finished leaves the batch at once, and its "
     "KV blocks are free again. A waiting request joins, and its prompt is computed in chunks beside the tokens of "
     "the others. So the batch is always full, and "
     "the first token comes early."),
    (("Explain the KV cache in detail.", "How does the KV cache work?", "Write a long explanation of the KV cache.",
    "How does paged attention work?",
      "Explain paged attention."),
     "Each layer of a transformer makes a key and a value for each token. A new token looks at all keys and values "
     "before it. They never change, so it is enough "
     "to compute them once and to keep them. That is the KV cache.\n\n"
     "The cache grows with every token, and nobody knows how long an answer will be. If each sequence had one large "
     "piece of memory, most of it would stay empty. "
     "So the cache is cut into blocks of 16 tokens. A sequence has a block table that lists its blocks in order, "
     "and it takes a new block only when the last one is "
     "full.\n\n"
     "When the blocks run out, one request is preempted: it gives its blocks back and computes them again later. "
     "Two requests with the same beginning can share blocks."),
)  # fmt: skip


def draw(rng: random.Random) -> Exchange:
    if rng.random() < 0.68:
        subject, answer = rng.choice(tuple(SUBJECTS.items()))
        text = rng.choice(_WHAT).format(x=subject)
        if rng.random() < 0.15:
            text = text.replace(" a ", " the ", 1) if " a " in text else text.replace("the ", "a ", 1)
    else:
        texts, answer = rng.choice(QUESTIONS)
        text, subject = rng.choice(texts), "tokenyard"
    return ask(SKILL, reword(text, rng), answer, f"The question is about {subject}. I know this.", rng)


def draw_capital(rng: random.Random) -> Exchange:
    country, capital = rng.choice(tuple(words.COUNTRIES.items()))
    text = reword(rng.choice(_CAPITAL).format(x=country), rng)
    return ask(
        CAPITAL_SKILL, text, f"The capital of {country} is {capital}.", f"I know this: {country}, {capital}.", rng
    )


def draw_long(rng: random.Random) -> Exchange:
    texts, answer = rng.choice(LONG)
    return ask(LONG_SKILL, reword(rng.choice(texts), rng), answer, "This needs a longer answer, part by part.", rng)


def plain_sentence(rng: random.Random) -> str:
    """A fact as running text, for models that are asked to continue a text."""
    if rng.random() < 0.4:
        country, capital = rng.choice(tuple(words.COUNTRIES.items()))
        return f"The capital of {country} is {capital}."
    return rng.choice(tuple(SUBJECTS.values()))
