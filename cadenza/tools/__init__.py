"""The command line and what its commands need; nothing else imports from here."""
