-- The lanes and spaces a token is for, with blanks between them; NULL: all. `lane` stays the first of the lanes.
ALTER TABLE api_tokens ADD COLUMN lanes TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, ADD COLUMN spaces TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
