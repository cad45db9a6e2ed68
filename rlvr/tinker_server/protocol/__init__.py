"""What travels: bodies of requests and answers, their binary forms, errors. Knows no torch, no HTTP, no store."""
