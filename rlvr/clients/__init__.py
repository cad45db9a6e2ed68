"""Clients: who samples and who trains. All speak the protocols of `rlvr.protocols`."""
