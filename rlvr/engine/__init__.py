"""The engine: tokens in, tokens and gradients out. It knows nothing of rewards, tasks or text. torch lives here."""
