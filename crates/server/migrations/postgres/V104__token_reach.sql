-- The lanes and spaces a token is for, with blanks between them; NULL: all. `lane` stays the first of the lanes.
ALTER TABLE api_tokens ADD COLUMN lanes TEXT;
ALTER TABLE api_tokens ADD COLUMN spaces TEXT;
