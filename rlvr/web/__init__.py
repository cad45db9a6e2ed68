"""What both servers stand on: authentication, errors, logs, sockets."""
