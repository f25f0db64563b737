"""Tools and reasoning: from a chat's body to a grammar, and from an output's text to events."""
