"""Elastic expert parallelism inside SGLang: what decides is in flexfloor.membership, what acts is here."""
