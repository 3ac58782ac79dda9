"""What is stored and what reading gives, as plain data. Importing these modules costs next to nothing."""
