"""What the APIs of chats share: messages, turns, and the one path from a body to a response."""
