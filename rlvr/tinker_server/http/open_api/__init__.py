"""The open endpoints: OpenAI's completions and chat, and generation by token ids, over the same engines."""
