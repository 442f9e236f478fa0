"""Chats before they are tokens: messages, templates, tools, documents."""
