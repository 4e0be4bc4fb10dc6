//! Small tables for people: aligned columns, numbers to the right, nothing that could upset a terminal.

const WIDEST_CELL: usize = 60;

pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<const N: usize>(titles: [&str; N]) -> Self {
        Table { rows: vec![titles.map(str::to_uppercase).to_vec()] }
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.iter().map(|cell| harmless(cell)).collect());
    }

    pub fn render(&self) -> String {
        let columns = self.rows[0].len();
        let width = |c: usize| self.rows.iter().map(|row| row[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let is_number = |c: usize| self.rows.len() > 1 && self.rows[1..].iter().all(|row| looks_like_a_number(&row[c]));
        let numbers: Vec<bool> = (0..columns).map(is_number).collect();
        let mut text = String::new();
        for row in &self.rows {
            let cells: Vec<String> = (0..columns)
                .map(|c| {
                    if numbers[c] { format!("{:>1$}", row[c], widths[c]) } else { format!("{:<1$}", row[c], widths[c]) }
                })
                .collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

fn looks_like_a_number(cell: &str) -> bool {
    cell.is_empty()
        || cell == "-"
        || cell.starts_with(|c: char| c.is_ascii_digit()) && cell.chars().all(|c| c.is_ascii_digit() || c == '.')
}

/// Without control characters (a target may hold escape sequences), and not too wide.
pub fn harmless(text: &str) -> String {
    let clean = text.chars().map(|c| if c.is_control() { '·' } else { c });
    if text.chars().count() <= WIDEST_CELL {
        clean.collect()
    } else {
        clean.take(WIDEST_CELL - 1).chain(['…']).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_right_and_words_left() {
        let mut table = Table::new(["lane", "sent"]);
        table.row(["log".into(), "7".into()]);
        table.row(["invoices".into(), "1200".into()]);
        assert_eq!(table.render(), "LANE      SENT\nlog          7\ninvoices  1200\n");
    }

    #[test]
    fn a_cell_cannot_move_the_cursor() {
        assert_eq!(harmless("a\x1b[2Jb"), "a·[2Jb");
        assert_eq!(harmless(&"x".repeat(99)).chars().count(), WIDEST_CELL);
    }
}
