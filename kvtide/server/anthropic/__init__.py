"""Anthropic's Messages API: bodies into chats (`messages_request`), outputs into its answers."""
