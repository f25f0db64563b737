"""OpenAI's Responses API, with stored responses (`response_history`)."""
