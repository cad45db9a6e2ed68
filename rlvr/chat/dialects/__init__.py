"""The dialects in which programs talk to a model over HTTP, and the one form of a conversation behind them."""
