"""Skill: greetings and small talk.

Knows what people say in passing and one fixed answer (or a few) to each. Does not know how tokenyard works.
"""

import random
from dataclasses import replace

from demo_model import words
from demo_model.exchange import Exchange, ask, reword

SKILL = "small talk"

HELP = (
    "I can chat a little, add small numbers, make lists, answer in JSON, call tools, tell a story "
    "and answer questions about tokenyard."
)

_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello!", "Hello", "Hi!", "Hi", "Hey!", "Hi there!", "Hello there.", "Greetings!", "Hey there!", "Hello, model!",
    "Good day!",
      "Hi, nice to meet you.", "Hello, is anybody there?", "Howdy!", "Hello, world!", "Say hello.", "Say hi!",
      "Hello again!"),
     ("Hello! How can I help you?", "Hi! What can I do for you?", "Hello! I am glad that you are here.")),
    (("Good morning!", "Good morning to you.", "Morning!", "A very good morning!"),
    ("Good morning! How can I help you?",)),
    (("Good evening!", "Good evening to you.", "Evening!"), ("Good evening! How can I help you?",)),
    (("Good afternoon!", "Good afternoon to you."), ("Good afternoon! How can I help you?",)),
    (("Good night!", "Good night, sleep well.", "I am going to bed.", "Time to sleep."), ("Good night! Sleep well.",)),
    (("How are you?", "How are you today?", "How do you feel?", "How is it going?", "How's it going?",
    "How do you do?", "Are you well?",
      "Are you okay?", "How are things?", "How have you been?", "Hello, how are you?", "Hi, how are you?",
      "How are you doing?"),
     ("I am well, thank you. How are you?", "Very well, thank you! What can I do for you?")),
    (("I am fine.", "I am well, thanks.", "I'm good.", "I'm doing great!", "Very well, thank you.",
    "I feel great today."),
     ("I am glad to hear that. What shall we do?",)),
    (("I am sad.", "I feel sad today.", "I am tired.", "I'm not well.", "I had a bad day.", "I feel bad."),
     ("I am sorry to hear that. I hope that it gets better soon.",)),
    (("Thanks!", "Thank you!", "Thank you very much.", "Thanks a lot!", "Many thanks.", "Great, thanks!",
    "Thank you for your help.",
      "That helped, thank you.", "Cheers!", "Perfect, thank you."),
     ("You are welcome!", "You are welcome! Ask me anything else.")),
    (("Bye!", "Goodbye!", "Bye bye.", "See you later!", "See you soon.", "See you tomorrow.", "Farewell!",
    "I have to go.",
      "That is all, goodbye.", "I must leave now.", "Good bye.", "Talk to you later."),
     ("Goodbye! Come back soon.", "Goodbye! It was nice to talk to you.")),
    (("Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.",
    "Introduce yourself.",
      "Can you introduce yourself?", "Who am I talking to?", "Are you a model?", "What model are you?",
      "Which model are you?",
      "What is this?", "Do you have a name?"),
     ("I am the demo model of tokenyard, a very small language model.",)),
    (("What can you do?", "Help", "Help me.", "Can you help me?", "What do you know?", "What are your skills?",
    "How can you help me?",
      "I need help.", "What can I ask you?", "What should I ask?", "Give me some ideas.", "How do you work with me?",
      "Show me what you can do.",
      "What are you good at?", "What do you do?"),
     (HELP,)),
    (("Who made you?", "Who built you?", "Who trained you?", "Where do you come from?", "How were you made?",
    "How were you trained?",
      "What were you trained on?", "Where were you trained?"),
     ("I was trained on two CPU cores by the tokenyard project, from text that a script wrote.",)),
    (("How big are you?", "How large are you?", "How many parameters do you have?", "What size are you?",
    "Are you small?", "Are you large?"),
     ("I am very small: about four million parameters.",)),
    (("Are you human?", "Are you a robot?", "Are you a person?", "Are you real?", "Are you alive?", "Is this a human?",
    "Are you a bot?"),
     ("No human, only a very small language model.",)),
    (("Do you sleep?", "Do you eat?", "Do you dream?", "Are you hungry?", "Are you tired?", "Do you get bored?"),
     ("No, I am a program. I only wait for tokens.",)),
    (("How old are you?", "When were you born?", "When is your birthday?", "What is your age?"),
     ("I have no age. I was trained in less than an hour.",)),
    (("Tell me a joke.", "Tell me a joke!", "Do you know a joke?", "Make me laugh.", "Say something funny.",
    "Another joke, please.",
      "Tell me something funny.", "I want to hear a joke.", "Can you tell me a joke?", "Joke please."),
     ("Why did the token cross the yard? To catch the next train.",
      "Why is the scheduler so calm? It takes everything step by step.",
      "Why did the cache go to school? It wanted to remember more.")),
    (("You are great!", "You are nice.", "Well done!", "Good job!", "I like you.", "You are funny.", "You are smart.",
    "Nice work!", "Great!",
      "Very good!", "Wonderful!", "Excellent!"),
     ("Thank you! That is kind of you.",)),
    (("You are wrong.", "That is wrong.", "That's not right.", "You made a mistake.", "Wrong!", "This is not correct.",
    "No, that is false."),
     ("I am sorry. I am a very small model and I make mistakes.",)),
    (("Sorry!", "I am sorry.", "My mistake.", "Excuse me.", "Pardon me."), ("No problem at all.",)),
    (("Okay.", "OK", "Yes.", "Yes", "Sure.", "I see.", "All right.", "Fine.", "Good.", "Understood."),
    ("Good. What shall we do next?",)),
    (("No.", "No", "No thanks.", "No, thank you.", "Nothing.", "Not now."),
    ("All right. I am here when you need me.",)),
    (("What's up?", "What's new?", "What is new?", "Sup?", "What are you doing?", "What is happening?"),
     ("Not much. I am waiting for tokens. What can I do for you?",)),
    (("Can you write code?", "Do you know Python?", "Can you program?", "Write a program.", "Write some code."),
     ("No, I am too small to write code. tokenyard can serve a larger model that does.",)),
    (("Do you speak French?", "Do you speak German?", "Can you speak Spanish?", "What languages do you speak?",
    "Which languages do you know?"),
     ("I speak only simple English.",)),
    (("What is the weather like?", "What time is it?", "What day is it today?", "What is the date?", "Is it raining?",
    "What's the time?"),
     ("I cannot see that without a tool. Give me a tool and I will call it.",)),
    (("I love you.", "Do you like me?", "Are we friends?", "Will you be my friend?", "Do you love me?"),
    ("I like talking with you.",)),
    (("Test", "Testing", "This is a test.", "Test 1 2 3", "Testing, one two three.", "Just a test.", "ping", "Ping!",
    "Are you there?",
      "Do you hear me?", "Can you hear me?", "Does this work?", "Is this working?"),
     ("Yes, I am here and it works.",)),
)  # fmt: skip

_NAMED = (
    "You are {name}.",
    "Your name is {name}.",
    "You are {name}, a helpful assistant.",
    "You are called {name}. Be brief.",
)
_WHO = (
    "Who are you?",
    "What is your name?",
    "What's your name?",
    "Introduce yourself.",
    "Do you have a name?",
    "Tell me your name.",
)


def draw(rng: random.Random) -> Exchange:
    texts, answers = rng.choice(_TALK)
    base = rng.choice(texts)
    return ask(
        SKILL, reword(base, rng), answers, f'The user says "{base}" This is small talk, so I answer kindly.', rng
    )


def draw_named(rng: random.Random) -> Exchange:
    """The system message gives the model a name, and the model uses it."""
    name = words.a_name(rng)
    told = rng.choice(_NAMED).format(name=name)
    thought = f"The system message says that I am {name}."
    asked = ask("system message", reword(rng.choice(_WHO), rng), f"I am {name}.", thought, rng, key=f"system {name}")
    return replace(asked, system=told)
